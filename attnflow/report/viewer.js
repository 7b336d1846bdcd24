"use strict";
// Tokens on the sphere or circle, a time slider, and curves that follow it.
const stage = byId("stage"), slider = byId("time"), playing = byId("play"), pace = byId("pace");
let flow, tokens, radii, groups, panels = [], frame = 0, timer = 0;
let turn = [[-0.707, 0.707, 0], [-0.276, -0.276, 0.921], [0.651, 0.651, 0.39]]; // rows: right, up, towards the eye

function product(a, b) { return a.map((row) => b[0].map((_, j) => row[0] * b[0][j] + row[1] * b[1][j] + row[2] * b[2][j])); }

function choose(k) {
  flow = data.flows[k];
  tokens = flow.tokens ? new Int16Array(bytes(flow.tokens)) : null;
  groups = flow.groups ? new Uint8Array(bytes(flow.groups)) : null;
  radii = flow.weights ? new Float32Array(bytes(flow.weights)) : null;
  slider.max = flow.ts.length - 1;
  frame = Math.min(frame, flow.ts.length - 1);
  const side = byId("series");
  side.replaceChildren();
  panels = flow.series.map((s) => new Panel(side, s.name, flow.clock, flow.ts, s.curves, seek));
  if (flow.dims === 2 && flow.sphere && tokens) panels.unshift(new Panel(side, "angles", flow.clock, flow.ts, angles(), seek));
  byId("note").textContent = flow.note;
  const legend = byId("spaces");
  legend.replaceChildren();
  flow.spaces.forEach((space) => { element(legend, "span", space.label, "key").style.color = COLOURS[space.colour]; });
  show();
}

/** Angle of up to 200 tokens against time, without lines across the cut at +-pi. */
function angles() {
  const every = Math.ceil(flow.n / 200), found = [];
  for (let i = 0; i < flow.n; i += every) {
    const y = flow.ts.map((_, t) => Math.atan2(tokens[(t * flow.n + i) * 2 + 1], tokens[(t * flow.n + i) * 2]));
    found.push({ label: "", y, thin: true, wrap: true });
  }
  return found;
}

function place(v) {
  return flow.dims === 2 ? [v[0], v[1], 0] : turn.map((row) => row[0] * v[0] + row[1] * v[1] + row[2] * v[2]);
}

function greatCircle(pen, normal, radius, cx, cy) {
  const helper = Math.abs(normal[0]) < 0.9 ? [1, 0, 0] : [0, 1, 0];
  const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
  const unit = (a) => { const l = Math.hypot(...a); return a.map((v) => v / l); };
  const u = unit(cross(normal, helper)), v = cross(unit(normal), u), full = pen.globalAlpha;
  for (let k = 0; k < 96; k++) {
    const at = (s) => place(u.map((a, i) => a * Math.cos(s) + v[i] * Math.sin(s)));
    const p = at((k * Math.PI) / 48), q = at(((k + 1) * Math.PI) / 48);
    pen.globalAlpha = p[2] + q[2] < 0 ? 0.3 * full : full;
    pen.beginPath();
    pen.moveTo(cx + radius * p[0], cy - radius * p[1]);
    pen.lineTo(cx + radius * q[0], cy - radius * q[1]);
    pen.stroke();
  }
  pen.globalAlpha = full;
}

function draw() {
  const start = performance.now(), [pen, w, h] = fit(stage);
  if (!tokens) return;
  const cx = w / 2, cy = h / 2, radius = (flow.dims === 2 ? 0.33 : 0.45) * Math.min(w, h), n = flow.n;
  pen.strokeStyle = "#bbb";
  if (flow.sphere) {
    pen.beginPath(); pen.arc(cx, cy, radius, 0, 7); pen.stroke();
    pen.strokeStyle = "#e4e4e4";
    if (flow.dims === 3) [[1, 0, 0], [0, 1, 0], [0, 0, 1]].forEach((axis) => greatCircle(pen, axis, radius, cx, cy));
  }
  for (const space of flow.spaces) {
    pen.strokeStyle = COLOURS[space.colour]; pen.lineWidth = 1.5;
    if (space.kind === "plane") greatCircle(pen, space.vector, radius, cx, cy);
    else {
      const e = place(space.vector);
      pen.beginPath(); pen.moveTo(cx - radius * e[0], cy + radius * e[1]); pen.lineTo(cx + radius * e[0], cy - radius * e[1]); pen.stroke();
    }
    pen.lineWidth = 1;
  }
  const size = Math.max(1.3, Math.min(5, 60 / Math.sqrt(n))), unit = radius / 32767, layers = Array.from({ length: 8 }, () => []);
  const X = new Float32Array(n), Y = new Float32Array(n);
  const [[a, b, c], [d, e, f], [g, i, j]] = turn;
  for (let k = 0, p = frame * n * flow.dims; k < n; k++, p += flow.dims) {
    const x = tokens[p], y = tokens[p + 1], z = flow.dims === 3 ? tokens[p + 2] : 0;
    if (flow.dims === 2) { X[k] = cx + unit * x; Y[k] = cy - unit * y; layers[7].push(k); continue; }
    X[k] = cx + unit * (a * x + b * y + c * z);
    Y[k] = cy - unit * (d * x + e * y + f * z);
    layers[Math.max(0, Math.min(7, Math.floor(((g * x + i * y + j * z) / 32767 + 1) * 4)))].push(k);
  }
  layers.forEach((layer, depth) => {
    pen.globalAlpha = 0.25 + (0.65 * depth) / 7;
    for (const k of layer) {
      const r = size * (0.7 + (0.5 * depth) / 7) * (radii ? Math.min(4, Math.max(0.3, Math.sqrt(radii[k]))) : 1);
      pen.fillStyle = COLOURS[groups ? groups[k] : 0];
      if (r < 1.5) pen.fillRect(X[k] - r, Y[k] - r, 2 * r, 2 * r);
      else { pen.beginPath(); pen.arc(X[k], Y[k], r, 0, 7); pen.fill(); }
    }
  });
  pen.globalAlpha = 1;
  if (flow.dims === 2 && flow.sphere) density(pen, cx, cy, radius);
  document.body.dataset.drawn = Number(document.body.dataset.drawn || 0) + 1;
  document.body.dataset.milliseconds = (performance.now() - start).toFixed(1);
}

/** Mass in 90 sectors as bars outside the circle (square root, so that small mass shows). */
function density(pen, cx, cy, radius) {
  const bins = new Float64Array(90);
  for (let k = 0, p = frame * flow.n * 2; k < flow.n; k++, p += 2)
    bins[Math.min(89, Math.floor(((Math.atan2(tokens[p + 1], tokens[p]) / (2 * Math.PI) + 1) % 1) * 90))] += (radii ? radii[k] : 1) / flow.n;
  pen.strokeStyle = COLOURS[5]; pen.lineWidth = 3;
  bins.forEach((mass, k) => {
    const s = ((k + 0.5) * 2 * Math.PI) / 90, r = 1.06 * radius, q = r + 0.4 * radius * Math.sqrt(mass);
    if (mass > 0) { pen.beginPath(); pen.moveTo(cx + r * Math.cos(s), cy - r * Math.sin(s)); pen.lineTo(cx + q * Math.cos(s), cy - q * Math.sin(s)); pen.stroke(); }
  });
  pen.lineWidth = 1;
}

function show() {
  slider.value = frame;
  byId("now").textContent = `${flow.clock} = ${number(flow.ts[frame])}`;
  document.body.dataset.frame = frame;
  draw();
  panels.forEach((panel) => panel.cursor(frame));
}

function seek(t) {
  let best = 0;
  flow.ts.forEach((s, k) => { if (Math.abs(s - t) < Math.abs(flow.ts[best] - t)) best = k; });
  frame = best;
  show();
}

function play(on) {
  cancelAnimationFrame(timer);
  playing.textContent = on ? "Pause" : "Play";
  playing.setAttribute("aria-pressed", String(on));
  if (!on) return;
  if (frame >= flow.ts.length - 1) frame = 0;
  let last = performance.now();
  const step = (now) => {
    const due = Math.floor(((now - last) / 1000) * Number(pace.value));
    if (due > 0) {
      last = now;
      frame = Math.min(flow.ts.length - 1, frame + due);
      show();
    }
    if (frame < flow.ts.length - 1) timer = requestAnimationFrame(step); else play(false);
  };
  timer = requestAnimationFrame(step);
}

slider.addEventListener("input", () => { frame = Number(slider.value); show(); });
playing.addEventListener("click", () => play(playing.getAttribute("aria-pressed") !== "true"));
byId("flow").addEventListener("change", (event) => choose(Number(event.target.value)));
stage.addEventListener("pointerdown", (event) => stage.setPointerCapture(event.pointerId));
stage.addEventListener("pointermove", (event) => {
  if (!(event.buttons & 1) || flow.dims === 2) return;
  const a = event.movementX / 150, b = event.movementY / 150;
  const about = [[Math.cos(a), 0, Math.sin(a)], [0, 1, 0], [-Math.sin(a), 0, Math.cos(a)]];
  const tilt = [[1, 0, 0], [0, Math.cos(b), -Math.sin(b)], [0, Math.sin(b), Math.cos(b)]];
  turn = product(tilt, product(about, turn));
  draw();
});
document.addEventListener("keydown", (event) => {
  if (["INPUT", "SELECT", "BUTTON"].includes(document.activeElement.tagName)) return;
  if (event.key === " ") { event.preventDefault(); playing.click(); }
});
window.addEventListener("resize", () => { panels.forEach((panel) => panel.draw()); show(); });
choose(0);
