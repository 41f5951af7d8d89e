// Films of pictures: played, paused, stepped through.
"use strict";
for (const film of document.querySelectorAll(".film")) {
  const pictures = JSON.parse(film.querySelector("script").textContent), last = pictures.length - 1;
  const [picture, button, slider] = ["img", "button", "input"].map((name) => film.querySelector(name));
  let timer = 0;
  const show = (i) => {
    slider.value = String(i);
    picture.src = `data:image/png;base64,${pictures[i]}`;
  };
  const pause = () => {
    clearInterval(timer);
    timer = 0;
    button.textContent = "Play";
  };
  button.addEventListener("click", () => {
    if (timer) return pause();
    if (Number(slider.value) === last) show(0);
    button.textContent = "Pause";
    timer = setInterval(() => {
      if (Number(slider.value) < last) show(Number(slider.value) + 1);
      if (Number(slider.value) === last) pause();
    }, 60);
  });
  slider.addEventListener("input", () => {
    pause();
    show(Number(slider.value));
  });
}
