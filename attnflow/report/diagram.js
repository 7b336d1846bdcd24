"use strict";
// A phase diagram: colour over two axes, values under the pointer, sections through the picked cell.
const stage = byId("stage"), shade = new Uint8Array(bytes(data.colours));
const xs = data.x.values, ys = data.y.values;
let choice, values, low, high, picked = [0, 0];

function choose(k) {
  choice = data.choices[k];
  values = new Float32Array(bytes(choice.values));
  [low, high] = [Infinity, -Infinity];
  for (const v of values) if (Number.isFinite(v)) { low = Math.min(low, v); high = Math.max(high, v); }
  show();
}

/** Axis values at cell i, cells being equally wide. */
function paint() {
  const [pen, w, h] = fit(stage), box = { left: 56, right: w - 78, top: 8, bottom: h - 36 };
  const small = document.createElement("canvas");
  small.width = xs.length; small.height = ys.length;
  const ink = small.getContext("2d"), image = ink.createImageData(xs.length, ys.length);
  for (let r = 0; r < ys.length; r++) for (let c = 0; c < xs.length; c++) {
    const v = values[r * xs.length + c], at = 4 * ((ys.length - 1 - r) * xs.length + c);
    const k = 3 * Math.round(255 * (high > low ? (v - low) / (high - low) : 0.5));
    image.data.set(Number.isFinite(v) ? [shade[k], shade[k + 1], shade[k + 2], 255] : [230, 230, 230, 255], at);
  }
  ink.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, box.left, box.top, box.right - box.left, box.bottom - box.top);
  const cw = (box.right - box.left) / xs.length, ch = (box.bottom - box.top) / ys.length;
  pen.fillStyle = "#333"; pen.font = "11px system-ui, sans-serif"; pen.textAlign = "center";
  const some = (list, count) => list.map((v, k) => [v, k]).filter((_, k) => k % Math.ceil(list.length / count) === 0);
  some(xs, 7).forEach(([v, k]) => pen.fillText(number(v), box.left + (k + 0.5) * cw, box.bottom + 14));
  pen.fillText(data.x.name, (box.left + box.right) / 2, h - 6);
  pen.textAlign = "right";
  some(ys, 9).forEach(([v, k]) => pen.fillText(number(v), box.left - 5, box.bottom - (k + 0.5) * ch + 4));
  pen.save(); pen.translate(12, (box.top + box.bottom) / 2); pen.rotate(-Math.PI / 2); pen.textAlign = "center"; pen.fillText(data.y.name, 0, 0); pen.restore();
  for (let k = 0; k < 64; k++) {
    const c = 3 * (k * 4);
    pen.fillStyle = `rgb(${shade[c]},${shade[c + 1]},${shade[c + 2]})`;
    pen.fillRect(w - 68, box.bottom - ((k + 1) * (box.bottom - box.top)) / 64, 12, (box.bottom - box.top) / 64 + 1);
  }
  pen.fillStyle = "#333"; pen.textAlign = "left";
  pen.fillText(number(high), w - 52, box.top + 8);
  pen.fillText(number(low), w - 52, box.bottom);
  pen.strokeStyle = "#D55E00"; pen.lineWidth = 2;
  const [bw, bh] = [Math.max(cw, 10), Math.max(ch, 10)];
  pen.strokeRect(box.left + (picked[1] + 0.5) * cw - bw / 2, box.bottom - (picked[0] + 0.5) * ch - bh / 2, bw, bh);
  stage.cells = { ...box, cw, ch };
}

function under(event) {
  const at = stage.getBoundingClientRect(), box = stage.cells;
  const c = Math.floor((event.clientX - at.left - box.left) / box.cw), r = Math.floor((box.bottom - (event.clientY - at.top)) / box.ch);
  return r >= 0 && c >= 0 && r < ys.length && c < xs.length ? [r, c] : null;
}

function words([r, c]) {
  const k = r * xs.length + c;
  const spread = choice.low ? ` (quartiles ${number(choice.low[k])} .. ${number(choice.high[k])} over ${choice.count})` : "";
  return `${data.y.name} = ${number(ys[r])}, ${data.x.name} = ${number(xs[c])}: ${choice.label} ${number(values[k])}${spread}`;
}

function show() {
  paint();
  byId("picked").textContent = words(picked);
  const [r, c] = picked, width = xs.length, side = byId("series");
  side.replaceChildren();
  const row = (a) => a && Array.from(a.slice(r * width, (r + 1) * width));
  const along = { label: "", y: row(values), low: row(choice.low), high: row(choice.high) };
  new Panel(side, `at ${data.y.name} = ${number(ys[r])}`, data.x.name, xs, [along], null).cursor(c);
  const down = { label: "", y: ys.map((_, k) => values[k * width + c]) };
  new Panel(side, `at ${data.x.name} = ${number(xs[c])}`, data.y.name, ys, [down], null).cursor(r);
  const cell = choice.rows[data.x.swept ? r * width + c : r];
  byId("command").textContent = cell.command;
  const link = byId("open");
  link.hidden = !cell.href;
  if (cell.href) link.href = cell.href; else link.removeAttribute("href");
  document.body.dataset.picked = picked.join(" ");
}

stage.addEventListener("pointermove", (event) => { const cell = under(event); byId("hover").textContent = cell ? words(cell) : ""; });
stage.addEventListener("click", (event) => { const cell = under(event); if (cell) { picked = cell; show(); } });
stage.addEventListener("keydown", (event) => {
  const step = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  picked = [Math.max(0, Math.min(ys.length - 1, picked[0] + step[0])), Math.max(0, Math.min(xs.length - 1, picked[1] + step[1]))];
  show();
});
byId("choice").addEventListener("change", (event) => choose(Number(event.target.value)));
window.addEventListener("resize", show);
choices();
function choices() {
  data.choices.forEach((each, k) => { element(byId("choice"), "option", each.label).value = k; each.low = each.low && new Float32Array(bytes(each.low)); each.high = each.high && new Float32Array(bytes(each.high)); });
  choose(0);
}
