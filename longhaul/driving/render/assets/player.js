"use strict";
// Plays the recordings of the .player of a page; web_player.py says how the data is packed. "#episode-3" in an address
// shows recording 3, "#episode-3-7" follows agent 7 in it, and a <canvas data-episode="3"> is a picture of it.
(() => {
  const NOWHERE = -32768;
  const VIEW = 80; // metres across at zoom 1
  const KINDS = { 1: "vehicle", 2: "pedestrian", 3: "cyclist", 4: "other" };
  const PLAY = '<svg viewBox="0 0 14 14" aria-hidden="true"><path d="M2 0l11 7-11 7z"/></svg>';
  const PAUSE = '<svg viewBox="0 0 14 14" aria-hidden="true"><path d="M1 0h4v14H1zM9 0h4v14H9z"/></svg>';

  function units(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Float64Array.from({ length: bytes.length / 2 }, (_, i) => view.getInt16(2 * i, true));
  }
  const points = (p) => units(p.d).map((u, i) => (u === NOWHERE ? NaN : p.o[i % 2] + u * p.s));
  const headings = (text) => units(text).map((u) => u * 1e-4);
  const number = (v) => (v === null ? "\u2013" : String(Number(v.toPrecision(3))));
  const words = (name) => name.replaceAll("_", " ");

  function trace(path, xy, from, count, close) {
    path.moveTo(xy[2 * from], xy[2 * from + 1]);
    for (let i = from + 1; i < from + count; i++) path.lineTo(xy[2 * i], xy[2 * i + 1]);
    if (close) path.closePath();
  }

  // What to paint of a map, in order. Kinds are those of the Waymo Open Motion Dataset (datasets/log.py).
  const LAYERS = [
    { role: "road", kinds: [1, 2], width: 4 },
    { role: "road", kinds: [20], fill: true },
    { role: "bike", kinds: [3], width: 1.8 },
    { role: "crosswalk", kinds: [18], fill: true },
    { role: "bump", kinds: [19], fill: true },
    { role: "line", kinds: [7, 8], width: 0.2 },
    { role: "line", kinds: [6], width: 0.2, dash: [3, 4.5] },
    { role: "yellow", kinds: [11, 12, 13], width: 0.2 },
    { role: "yellow", kinds: [9, 10], width: 0.2, dash: [3, 4.5] },
    { role: "edge", kinds: [15, 16], width: 0.28 },
    { role: "stop", kinds: [17], fill: true },
  ];

  function layers(map) {
    const xy = points(map.points);
    const paths = LAYERS.map(() => new Path2D());
    let from = 0;
    map.kinds.forEach((kind, i) => {
      const layer = LAYERS.findIndex((l) => l.kinds.includes(kind));
      if (kind === 17) {
        for (let k = 0; k < 8; k++) {
          const a = ((k + 0.5) * Math.PI) / 4;
          const x = xy[2 * from] + 0.8 * Math.cos(a), y = xy[2 * from + 1] + 0.8 * Math.sin(a);
          k ? paths[layer].lineTo(x, y) : paths[layer].moveTo(x, y);
        }
        paths[layer].closePath();
      } else if (layer >= 0) {
        trace(paths[layer], xy, from, map.counts[i], LAYERS[layer].fill);
      }
      from += map.counts[i];
    });
    return paths;
  }

  function unpack(r) {
    const route = new Path2D(), line = points(r.route);
    if (line.length > 2) trace(route, line, 0, line.length / 2, false);
    const verdicts = new Map([[r.ego, { events: r.events, metrics: r.metrics }], ...r.others.map((v) => [v.agent, v])]);
    return {
      ...r, route, verdicts, series: {}, position: points(r.position), heading: headings(r.heading), lights: points(r.lights), camera: points(r.camera),
      expert: r.expert && points(r.expert), expertHeading: r.expert && headings(r.expertHeading),
    };
  }

  // The pose of item i of n at a time between two frames.
  function between(xy, heading, n, i, time, frames) {
    const t = Math.min(Math.floor(time), frames - 1), u = Math.min(t + 1, frames - 1), share = time - t;
    const a = t * n + i, b = u * n + i;
    const x = xy[2 * a], y = xy[2 * a + 1];
    if (Number.isNaN(x)) return null;
    if (Number.isNaN(xy[2 * b])) return { x, y, heading: heading[a] };
    const turn = heading[b] - heading[a];
    const shortest = Math.atan2(Math.sin(turn), Math.cos(turn));
    return {
      x: x + share * (xy[2 * b] - x), y: y + share * (xy[2 * b + 1] - y), heading: heading[a] + share * shortest,
    };
  }

  // Where agent i is at a frame, or was last, or comes first.
  function whereabouts(r, i, frame) {
    const n = r.kinds.length, known = (t) => !Number.isNaN(r.position[2 * (t * n + i)]);
    let t = Math.min(Math.floor(frame), r.frames - 1);
    while (t > 0 && !known(t)) t--;
    while (t < r.frames - 1 && !known(t)) t++;
    return { x: r.position[2 * (t * n + i)], y: r.position[2 * (t * n + i) + 1] };
  }

  // The speed of agent i at a frame, m/s, over up to two frames on either side; null where it is not there.
  function speedOf(r, i, frame) {
    if (i === r.ego) return r.speed[frame];
    const n = r.kinds.length, at = (t) => 2 * (t * n + i);
    const known = (t) => t >= 0 && t < r.frames && !Number.isNaN(r.position[at(t)]);
    if (!known(frame)) return null;
    let a = frame, b = frame;
    while (a > frame - 2 && known(a - 1)) a--;
    while (b < frame + 2 && known(b + 1)) b++;
    if (a === b) return 0;
    return Math.hypot(r.position[at(b)] - r.position[at(a)], r.position[at(b) + 1] - r.position[at(a) + 1]) / ((b - a) * r.dt);
  }

  function nameOf(r, i) {
    if (i === r.ego) return "ego";
    return `${KINDS[r.kinds[i]] || "other"} ${r.numbers[i]}${r.controlled[i] ? ", driven" : ""}`;
  }

  function body(c, pose, length, width) {
    c.save();
    c.translate(pose.x, pose.y);
    c.rotate(pose.heading);
    c.beginPath();
    c.rect(-length / 2, -width / 2, length, width);
    c.restore();
  }

  function agent(c, ink, pose, kind, role, length, width, pixel) {
    c.fillStyle = ink(role);
    c.strokeStyle = ink("outline");
    c.lineWidth = 1.2 * pixel;
    if (kind === 2) {
      c.beginPath();
      c.arc(pose.x, pose.y, Math.max(length, width, 1.2) / 2, 0, 2 * Math.PI);
    } else {
      body(c, pose, length, width);
    }
    c.fill();
    c.stroke();
    if (kind === 2 || width <= 1) return;
    c.save();
    c.translate(pose.x, pose.y);
    c.rotate(pose.heading);
    c.beginPath();
    c.moveTo(0.36 * length, 0);
    c.lineTo(0.12 * length, 0.3 * width);
    c.lineTo(0.12 * length, -0.3 * width);
    c.closePath();
    c.fillStyle = ink("outline");
    c.fill();
    c.restore();
  }

  // Red is a square, yellow a diamond, green a disc: told apart without colours.
  function light(c, ink, x, y, state, pixel) {
    c.beginPath();
    if (state === "1") c.rect(x - 0.9, y - 0.9, 1.8, 1.8);
    else if (state === "2") { c.moveTo(x - 1.2, y); c.lineTo(x, y + 1.2); c.lineTo(x + 1.2, y); c.lineTo(x, y - 1.2); c.closePath(); }
    else c.arc(x, y, 0.95, 0, 2 * Math.PI);
    c.fillStyle = ink({ 1: "red", 2: "amber", 3: "green" }[state] || "unknown");
    c.strokeStyle = ink("ink");
    c.lineWidth = pixel;
    c.fill();
    c.stroke();
  }

  function mount(root) {
    const part = (role) => root.querySelector(`[data-role="${role}"]`);
    const data = JSON.parse(root.querySelector('script[type="application/json"]').textContent);
    const recordings = data.recordings.map(unpack);
    const maps = data.maps.map(layers);
    const canvas = part("canvas");
    const state = { chosen: recordings[0], follow: recordings[0].ego, time: 0, playing: false, zoom: 1, last: 0 };
    let theme = {};
    const ink = (role) => theme[role] || "#888";

    function readTheme() {
      const style = getComputedStyle(document.documentElement);
      const roles = ["ground", "road", "bike", "line", "yellow", "edge", "crosswalk", "bump", "stop", "route", "ego", "vehicle",
        "pedestrian", "cyclist", "other", "outline", "ghost", "red", "amber", "green", "unknown", "fault", "good", "ink", "muted", "panel"];
      theme = Object.fromEntries(roles.map((role) => [role, style.getPropertyValue(`--map-${role}`).trim()]));
      theme.series = [0, 1, 2, 3, 4].map((i) => style.getPropertyValue(`--series-${i}`).trim());
      theme.rule = style.getPropertyValue("--rule").trim();
    }

    function drawMap(c, r) {
      LAYERS.forEach((layer, i) => {
        const path = maps[r.map][i];
        c.fillStyle = c.strokeStyle = ink(layer.role);
        if (layer.fill) return c.fill(path);
        c.lineWidth = layer.width;
        c.lineCap = layer.dash ? "butt" : "round";
        c.lineJoin = "round";
        c.setLineDash(layer.dash || []);
        c.stroke(path);
      });
      c.setLineDash([]);
      c.strokeStyle = ink("route");
      c.lineWidth = 1;
      c.stroke(r.route);
    }

    function drawAgents(c, r, shot, pixel) {
      const n = r.kinds.length, time = Math.min(shot.time, r.frames - 1), frame = Math.floor(time);
      r.lightStates.forEach((states, i) => light(c, ink, r.lights[2 * i], r.lights[2 * i + 1], states[frame], pixel));
      const order = [...r.kinds.keys()].sort((a, b) => r.controlled[a] - r.controlled[b] || (a === r.ego) - (b === r.ego));
      for (const i of order) {
        const pose = between(r.position, r.heading, n, i, time, r.frames);
        const role = r.controlled[i] ? "ego" : KINDS[r.kinds[i]] || "other";
        if (!pose) continue;
        agent(c, ink, pose, r.kinds[i], role, r.sizes[i][0], r.sizes[i][1], pixel);
        if (i === shot.follow && i !== r.ego) {
          body(c, pose, r.sizes[i][0] + 1.6, r.sizes[i][1] + 1.6);
          c.setLineDash([0.8, 0.8]);
          c.strokeStyle = ink("ink");
          c.lineWidth = 1.6 * pixel;
          c.stroke();
          c.setLineDash([]);
        }
      }
      if (r.expert && part("ghost").checked) {
        const pose = between(r.expert, r.expertHeading, 1, 0, time, r.frames);
        if (pose) {
          body(c, pose, r.sizes[r.ego][0], r.sizes[r.ego][1]);
          c.strokeStyle = ink("ghost");
          c.lineWidth = 1.6 * pixel;
          c.stroke();
        }
      }
      for (const [i, verdict] of r.verdicts) {
        for (const event of verdict.events) {
          if (event.frame > time) continue;
          const place = whereabouts(r, i, event.frame);
          c.beginPath();
          c.arc(place.x, place.y, 4.2, 0, 2 * Math.PI);
          c.strokeStyle = ink(event.good ? "good" : "fault");
          c.lineWidth = 3 * pixel;
          c.stroke();
        }
      }
    }

    function drawText(c, r, width, height, scale) {
      const frame = Math.min(Math.floor(state.time), r.frames - 1), speed = speedOf(r, state.follow, frame);
      const lines = [`${(state.time * r.dt).toFixed(1)} s`, speed === null ? "not there" : `${speed.toFixed(1)} m/s`];
      c.textBaseline = "middle";
      c.font = "600 14px system-ui, sans-serif";
      c.fillStyle = ink("panel");
      c.beginPath();
      c.roundRect(10, 10, 148, 30, 5);
      c.roundRect(10, height - 42, 10 * scale + 16, 32, 5);
      c.fill();
      c.fillStyle = ink("ink");
      c.textAlign = "right";
      c.fillText(lines[0], 68, 26);
      c.fillText(lines[1], 148, 26);
      c.font = "12px system-ui, sans-serif";
      c.textAlign = "center";
      c.fillText("10 m", 18 + 5 * scale, height - 30);
      c.strokeStyle = ink("ink");
      c.lineWidth = 2;
      c.beginPath();
      c.moveTo(18, height - 23); c.lineTo(18, height - 18); c.lineTo(18 + 10 * scale, height - 18); c.lineTo(18 + 10 * scale, height - 23);
      c.stroke();
    }

    // What a canvas shows of a shot {r, time, follow, zoom}: its middle in metres, and pixels of the page a metre.
    function view(canvas, { r, time, follow, zoom }) {
      const n = r.kinds.length, at = Math.min(time, r.frames - 1);
      const eye = follow === r.ego
        ? between(r.camera, new Float64Array(r.frames), 1, 0, at, r.frames)
        : between(r.position, r.heading, n, follow, at, r.frames) || whereabouts(r, follow, at);
      return { eye, scale: (canvas.clientWidth / VIEW) * zoom };
    }

    const main = () => ({ r: state.chosen, time: state.time, follow: state.follow, zoom: state.zoom });

    // The agent under a point of the canvas, or null: within its box and a few pixels around, the nearest.
    function agentAt(x, y) {
      const r = state.chosen, { eye, scale } = view(canvas, main());
      const px = eye.x + (x - canvas.clientWidth / 2) / scale, py = eye.y - (y - canvas.clientHeight / 2) / scale;
      const near = r.kinds.map((_, i) => {
        const pose = between(r.position, r.heading, r.kinds.length, i, state.time, r.frames);
        if (!pose) return { i, away: Infinity };
        const dx = px - pose.x, dy = py - pose.y, cos = Math.cos(pose.heading), sin = Math.sin(pose.heading);
        const inside = Math.abs(dx * cos + dy * sin) <= r.sizes[i][0] / 2 + 6 / scale
          && Math.abs(dy * cos - dx * sin) <= r.sizes[i][1] / 2 + 6 / scale;
        return { i, away: inside ? Math.hypot(dx, dy) : Infinity };
      }).reduce((best, one) => (one.away < best.away ? one : best), { i: null, away: Infinity });
      return near.i;
    }

    function follow(i) {
      state.follow = i;
      part("follow").value = String(i);
      showFacts(state.chosen);
      draw();
    }

    // A canvas's context in pixels of the page, with its size; null where it is not shown.
    function sized(canvas) {
      const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
      if (!width || !height) return null;
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
      }
      const c = canvas.getContext("2d");
      c.setTransform(ratio, 0, 0, ratio, 0, 0);
      return { c, width, height, ratio };
    }

    function paint(canvas, shot) {
      const place = sized(canvas);
      if (!place) return;
      const { c, width, height, ratio } = place, { eye, scale } = view(canvas, shot);
      c.fillStyle = ink("ground");
      c.fillRect(0, 0, width, height);
      const k = scale * ratio;
      c.setTransform(k, 0, 0, -k, canvas.width / 2 - k * eye.x, canvas.height / 2 + k * eye.y);
      drawMap(c, shot.r);
      drawAgents(c, shot.r, shot, 1 / scale);
      c.setTransform(ratio, 0, 0, ratio, 0, 0);
      if (canvas === part("canvas")) drawText(c, shot.r, width, height, scale);
    }

    // The agent of recording r that is followed in the chosen one; the ego where r has others.
    const same = (a, b) => a.id === b.id && a.numbers.join() === b.numbers.join();
    const followed = (r) => (same(r, state.chosen) ? state.follow : r.ego);

    // Speed (m/s) or acceleration (m/s\u00b2, over up to three frames on either side) at each frame; null where unknown.
    function series(r, name) {
      const i = followed(r), key = `${name} ${i}`;
      if (r.series[key]) return r.series[key];
      const speed = Array.from({ length: r.frames }, (_, t) => speedOf(r, i, t));
      const slope = (t) => {
        const a = Math.max(0, t - 3), b = Math.min(r.frames - 1, t + 3);
        return a === b || speed[a] === null || speed[b] === null ? null : (speed[b] - speed[a]) / ((b - a) * r.dt);
      };
      return (r.series[key] = name === "speed" ? speed : speed.map((_, t) => slope(t)));
    }

    function plot(name, title) {
      const place = sized(part(name));
      if (!place) return;
      const { c, width, height } = place, left = 44, top = 22, bottom = height - 18, wide = width - left - 8;
      const rs = ofScenario(), lines = rs.map((r) => series(r, name)), known = lines.flat().filter((v) => v !== null);
      const high = Math.max(1, ...known) * 1.05, low = Math.min(0, ...known) * 1.05;
      const length = Math.max(...rs.map((r) => (r.frames - 1) * r.dt), 0.1);
      const x = (seconds) => left + (seconds / length) * wide, y = (v) => bottom - ((v - low) / (high - low)) * (bottom - top);
      c.clearRect(0, 0, width, height);
      c.font = "12px system-ui, sans-serif";
      c.textBaseline = "middle";
      c.fillStyle = ink("ink");
      c.textAlign = "left";
      c.fillText(title, left, 9);
      c.fillStyle = ink("muted");
      c.textAlign = "right";
      c.strokeStyle = theme.rule;
      c.lineWidth = 1;
      for (const v of new Set([low, 0, high])) {
        c.fillText(number(v), left - 6, y(v));
        c.beginPath(); c.moveTo(left, y(v)); c.lineTo(left + wide, y(v)); c.stroke();
      }
      c.fillText(`${length.toFixed(1)} s`, left + wide, height - 8);
      rs.forEach((r, k) => {
        c.strokeStyle = theme.series[k % 5];
        c.lineWidth = r === state.chosen ? 2.4 : 1.2;
        c.beginPath();
        let pen = false;
        lines[k].forEach((v, t) => {
          if (v !== null) (pen ? c.lineTo : c.moveTo).call(c, x(t * r.dt), y(v));
          pen = v !== null;
        });
        c.stroke();
      });
      c.strokeStyle = ink("ink");
      c.lineWidth = 1;
      const now = x(state.time * state.chosen.dt);
      c.beginPath(); c.moveTo(now, top); c.lineTo(now, bottom); c.stroke();
    }

    const said = (r) => {
      const fault = r.events.find((event) => !event.good) || r.events[0];
      return `${r.label}${fault ? `, ${words(fault.name)} at ${(fault.frame * r.dt).toFixed(1)} s` : ""}`;
    };

    // The other policies' episodes of the scenario, each beside the chosen one at the same time.
    function showOthers() {
      const others = ofScenario();
      part("others").hidden = others.length < 2;
      part("others").replaceChildren(...(others.length < 2 ? [] : others).map((r, k) => {
        const button = document.createElement("button"), name = document.createElement("span");
        button.type = "button";
        button.setAttribute("aria-pressed", String(r === state.chosen));
        name.textContent = said(r);
        name.style.setProperty("--line", `var(--series-${k % 5})`);
        button.append(document.createElement("canvas"), name);
        button.addEventListener("click", () => {
          part("policy").value = String(k);
          choose(true);
          part("others").children[k].focus();
        });
        return button;
      }));
    }

    function draw() {
      const r = state.chosen;
      paint(canvas, main());
      ofScenario().forEach((other, k) => {
        const button = part("others").children[k];
        if (button) paint(button.firstChild, { r: other, time: state.time * r.dt / other.dt, follow: followed(other), zoom: state.zoom });
      });
      plot("speed", "speed, m/s");
      plot("acceleration", "acceleration, m/s\u00b2");
      part("slider").value = String(Math.floor(state.time));
      part("clock").textContent = `${(state.time * r.dt).toFixed(1)} / ${((r.frames - 1) * r.dt).toFixed(1)} s`;
    }

    // Pictures outside of the player, each of one moment.
    function drawPictures() {
      for (const picture of document.querySelectorAll("canvas[data-episode]")) {
        const r = recordings[Number(picture.dataset.episode)], agent = r.numbers.indexOf(Number(picture.dataset.agent));
        paint(picture, { r, time: Number(picture.dataset.frame), follow: agent < 0 ? r.ego : agent, zoom: 1.6 });
      }
    }

    function tick(now) {
      if (!state.playing) return;
      const passed = state.last ? (now - state.last) / 1000 : 0;
      state.last = now;
      state.time += (passed * Number(part("rate").value)) / state.chosen.dt;
      if (state.time >= state.chosen.frames - 1) { state.time = state.chosen.frames - 1; play(false); }
      draw();
      if (state.playing) requestAnimationFrame(tick);
    }

    function play(on) {
      const start = on && !state.playing;
      state.playing = on;
      part("play").innerHTML = on ? PAUSE : PLAY;
      part("play").setAttribute("aria-pressed", String(on));
      if (!start) return;
      if (state.time >= state.chosen.frames - 1) state.time = 0;
      state.last = 0;
      requestAnimationFrame(tick);
    }

    function seek(frame) {
      play(false);
      state.time = Math.max(0, Math.min(state.chosen.frames - 1, frame));
      draw();
    }

    function item(list, name, value, className) {
      const term = document.createElement("dt"), description = document.createElement("dd");
      term.textContent = name;
      description.textContent = value;
      if (className) description.className = className;
      list.append(term, description);
    }

    // What is known of the agent that is followed; its events on the time line, the ego's where it has none of its own.
    function showFacts(r) {
      const facts = part("facts"), ticks = part("ticks"), i = state.follow, verdict = r.verdicts.get(i);
      facts.replaceChildren();
      ticks.replaceChildren();
      item(facts, "agent", nameOf(r, i));
      item(facts, "size", `${number(r.sizes[i][0])} \u00d7 ${number(r.sizes[i][1])} m`);
      for (const event of (verdict || r.verdicts.get(r.ego)).events) {
        const className = event.good ? "good" : "fault", share = r.frames > 1 ? event.frame / (r.frames - 1) : 0;
        const mark = document.createElement("button");
        mark.type = "button";
        mark.textContent = words(event.name);
        mark.title = `${words(event.name)} at ${(event.frame * r.dt).toFixed(1)} s`;
        mark.className = `${className} ${share < 0.1 ? "start" : share > 0.9 ? "end" : ""}`;
        mark.style.left = `calc(8px + ${share} * (100% - 16px))`;
        mark.addEventListener("click", () => seek(event.frame));
        ticks.append(mark);
        if (verdict) item(facts, words(event.name), `at ${(event.frame * r.dt).toFixed(1)} s`, className);
      }
      if (!verdict) return item(facts, "metrics", "none: it is not driven");
      if (!verdict.events.length) item(facts, "events", "none");
      for (const [name, value] of Object.entries(verdict.metrics)) item(facts, words(name), number(value));
    }

    function legend(r) {
      const kinds = new Set(r.kinds.filter((_, i) => !r.controlled[i]));
      const box = (role) => `<rect width="20" height="10" y="1" rx="1" fill="var(--map-${role})"/>`;
      const disc = (role) => `<circle cx="10" cy="6" r="6" fill="var(--map-${role})"/>`;
      const square = (role) => `<rect x="4" width="12" height="12" fill="var(--map-${role})"/>`;
      const diamond = (role) => `<path d="M3 6l7-7 7 7-7 7z" fill="var(--map-${role})"/>`;
      const entries = [["driven", box("ego")], ["route", '<rect width="20" height="5" y="4" fill="var(--map-route)"/>']];
      if (r.expert) entries.push(["log", '<rect x="1" y="1" width="18" height="10" fill="none" stroke="var(--map-ghost)" stroke-width="2"/>']);
      for (const [kind, name] of Object.entries(KINDS)) {
        if (kinds.has(Number(kind))) entries.push([name, name === "pedestrian" ? disc(name) : box(name)]);
      }
      if (r.lights.some((v) => !Number.isNaN(v))) entries.push(["red", square("red")], ["yellow", diamond("amber")], ["green", disc("green")]);
      part("legend").innerHTML = entries.map(([name, shape]) => `<li><svg viewBox="0 0 20 12" aria-hidden="true">${shape}</svg>${name}</li>`).join("");
    }

    function options(select, names, values) {
      select.replaceChildren(...names.map((name, i) => {
        const option = document.createElement("option");
        option.value = String(values ? values[i] : i);
        option.textContent = name;
        return option;
      }));
    }

    const ids = [...new Set(recordings.map((r) => r.id))];
    const ofScenario = () => recordings.filter((r) => r.id === ids[Number(part("scenario").value)]);

    function choose(keepTime) {
      const before = state.chosen, r = ofScenario()[Number(part("policy").value)];
      const same = before.id === r.id && before.kinds.length === r.kinds.length; // who is followed stays who it is
      state.chosen = r;
      state.follow = same ? state.follow : r.ego;
      const order = [...r.kinds.keys()].sort((a, b) => (b === r.ego) - (a === r.ego) || r.controlled[b] - r.controlled[a]);
      options(part("follow"), order.map((i) => nameOf(r, i)), order);
      part("follow").value = String(state.follow);
      state.time = keepTime ? Math.min(state.time, state.chosen.frames - 1) : 0;
      part("slider").max = String(state.chosen.frames - 1);
      showFacts(state.chosen);
      legend(state.chosen);
      showOthers();
      draw();
    }

    // Shows the episode that the address names, if any, a little before what happened in it.
    function visit() {
      const [, episode, number] = location.hash.match(/^#episode-(\d+)(?:-(\d+))?$/) || [], r = recordings[Number(episode)];
      if (!r) return;
      part("scenario").value = String(ids.indexOf(r.id));
      chooseScenario();
      part("policy").value = String(ofScenario().indexOf(r));
      choose(false);
      const agent = r.numbers.indexOf(Number(number));
      if (agent >= 0) follow(agent);
      const event = (r.verdicts.get(state.follow) || r).events.find((one) => !one.good);
      seek(event ? event.frame - Math.round(1 / r.dt) : 0);
      root.scrollIntoView({ block: "start" });
      canvas.focus({ preventScroll: true });
    }

    function chooseScenario() {
      const before = part("policy").selectedOptions[0]?.textContent;
      const labels = ofScenario().map((r) => r.label);
      options(part("policy"), labels);
      part("policy").value = String(Math.max(0, labels.indexOf(before)));
      choose(false);
    }

    function zoom(factor) {
      state.zoom = Math.max(0.3, Math.min(4, state.zoom * factor));
      draw();
    }

    readTheme();
    options(part("scenario"), ids);
    part("scenario").addEventListener("change", chooseScenario);
    part("policy").addEventListener("change", () => choose(true));
    part("play").addEventListener("click", () => play(!state.playing));
    part("slider").addEventListener("input", (e) => seek(Number(e.target.value)));
    part("ghost").addEventListener("change", draw);
    part("follow").addEventListener("change", (e) => follow(Number(e.target.value)));
    canvas.addEventListener("click", (e) => {
      const found = agentAt(e.offsetX, e.offsetY);
      if (found !== null) follow(found);
    });
    canvas.addEventListener("mousemove", (e) => {
      canvas.style.cursor = agentAt(e.offsetX, e.offsetY) === null ? "" : "pointer";
    });
    part("nearer").addEventListener("click", () => zoom(1.25));
    part("farther").addEventListener("click", () => zoom(0.8));
    canvas.addEventListener("wheel", (e) => {
      if (!e.ctrlKey) return; // a plain wheel goes on to scroll the page
      e.preventDefault();
      zoom(Math.exp(-e.deltaY / 400));
    }, { passive: false });
    root.addEventListener("keydown", (e) => {
      if (e.target !== canvas) return;
      if (e.key === " ") play(!state.playing);
      else if (e.key === "ArrowRight") seek(Math.floor(state.time) + 1);
      else if (e.key === "ArrowLeft") seek(Math.ceil(state.time) - 1);
      else if (e.key === "Home") seek(0);
      else if (e.key === "End") seek(state.chosen.frames - 1);
      else if (e.key === "+" || e.key === "=") zoom(1.25);
      else if (e.key === "-") zoom(0.8);
      else if (e.key === "Escape") follow(state.chosen.ego);
      else return;
      e.preventDefault();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readTheme(); draw(); drawPictures(); });
    new ResizeObserver(() => { draw(); drawPictures(); }).observe(canvas);
    for (const name of ["speed", "acceleration"]) {
      part(name).addEventListener("click", (e) => {
        const longest = Math.max(...ofScenario().map((r) => (r.frames - 1) * r.dt));
        seek(Math.round((((e.offsetX - 44) / (part(name).clientWidth - 52)) * longest) / state.chosen.dt));
      });
    }
    addEventListener("hashchange", visit);
    chooseScenario();
    play(false);
    visit();
  }

  document.querySelectorAll(".player").forEach(mount);
})();
