"use strict";
// Shows the values under the pointer in a curve's caption. The values are read back from the drawn lines.
(() => {
  const numbers = (text) => text.split(" ").map(Number);
  const short = (v) => {
    for (const [scale, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (Math.abs(v) >= scale) return Number((v / (letter === "k" ? 1e3 : scale)).toPrecision(3)) + letter;
    }
    return String(Number(v.toPrecision(3)));
  };

  document.querySelectorAll(".curve").forEach((figure) => {
    const svg = figure.querySelector("svg"), output = figure.querySelector("output"), cursor = figure.querySelector(".cursor");
    const [left, right] = numbers(svg.dataset.x), [low, high] = numbers(svg.dataset.y);
    const [x0, y0, x1, y1] = numbers(svg.dataset.frame);
    const lines = [...svg.querySelectorAll("[data-line]")].map((path) =>
      [...path.getAttribute("d").matchAll(/[ML]([-\d.]+) ([-\d.]+)/g)].map((m) => [Number(m[1]), Number(m[2])]));
    const slots = [...figure.querySelectorAll("li b")];

    function nearest(points, x) {
      let a = 0, b = points.length - 1;
      while (b - a > 1) {
        const middle = (a + b) >> 1;
        if (points[middle][0] <= x) a = middle; else b = middle;
      }
      return Math.abs(points[a][0] - x) <= Math.abs(points[b][0] - x) ? points[a] : points[b];
    }

    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      if (x < x0 - 5 || x > x1 + 5) return;
      const found = lines.map((points) => nearest(points, x));
      const px = found[0][0];
      cursor.setAttribute("x1", px);
      cursor.setAttribute("x2", px);
      cursor.style.visibility = "visible";
      const values = found.map(([, y]) => short(low + ((y1 - y) / (y1 - y0)) * (high - low)));
      const at = short(left + ((px - x0) / (x1 - x0)) * (right - left));
      output.textContent = slots.length ? `at ${at}` : `${values[0]} at ${at}`;
      slots.forEach((slot, i) => { slot.textContent = values[i]; });
    });
    svg.addEventListener("pointerleave", () => {
      cursor.style.visibility = "hidden";
      output.textContent = "";
      slots.forEach((slot) => { slot.textContent = ""; });
    });
  });
})();
