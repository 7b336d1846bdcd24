"use strict";
// Shared by the pages: data, canvases, and a panel of curves with a moving cursor.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#9a9a9a"];
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);

/** The buffer behind base64 text. */
function bytes(text) {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out.buffer;
}

/** A new element with text; nothing is ever parsed as HTML. */
function element(parent, tag, text = "", className = "") {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (className) made.className = className;
  parent.appendChild(made);
  return made;
}

/** Match a canvas to its shown size; its pen in CSS pixels, width and height. */
function fit(canvas) {
  const ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
  const w = Math.max(1, Math.round(box.width * ratio)), h = Math.max(1, Math.round(box.height * ratio));
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, box.width, box.height);
  return [pen, box.width, box.height];
}

/** A few round numbers in [low, high]. */
function ticks(low, high, about = 5) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((m) => m * power >= raw) || 10);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high + 1e-9 * span; k++) found.push(k * step);
  return found;
}

function number(v) {
  if (v === null || !Number.isFinite(v)) return "–";
  return Math.abs(v) >= 1e4 || (v !== 0 && Math.abs(v) < 1e-3) ? v.toExponential(2) : String(Number(v.toPrecision(4)));
}

/** Curves {label, y, low, high} over xs; picking a place calls pick(x). */
class Panel {
  constructor(parent, name, xName, xs, curves, pick) {
    Object.assign(this, { xName, xs, curves });
    const box = element(parent, "figure", "", "panel");
    const caption = element(box, "figcaption", name);
    curves.forEach((curve, k) => {
      curve.colour = COLOURS[k % 7];
      if (curves.length > 1 && curve.label) element(caption, "span", curve.label, "key").style.color = curve.colour;
    });
    this.readout = element(caption, "output", "", "readout");
    const frame = element(box, "div", "", "stack");
    this.canvas = element(frame, "canvas");
    this.overlay = element(frame, "canvas");
    const drag = (event) => {
      if (!(event.buttons & 1) || !pick) return;
      const at = event.clientX - this.overlay.getBoundingClientRect().left;
      pick(this.x0 + ((at - this.left) / (this.right - this.left)) * (this.x1 - this.x0));
    };
    this.overlay.addEventListener("pointerdown", drag);
    this.overlay.addEventListener("pointermove", drag);
    const all = curves.flatMap((c) => [...c.y, ...(c.low || []), ...(c.high || [])]).filter((v) => v !== null && Number.isFinite(v));
    let low = Infinity, high = -Infinity;
    for (const v of all) { if (v < low) low = v; if (v > high) high = v; }
    if (!all.length) [low, high] = [0, 1];
    this.log = low > 0 && high / low > 1e3;
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    [this.y0, this.y1] = this.log ? [Math.log10(low), Math.log10(high)] : [low, high];
    [this.x0, this.x1] = [xs[0], xs[xs.length - 1]];
    if (!(this.x1 > this.x0)) this.x1 = this.x0 + 1;
    this.draw();
  }

  px(x) { return this.left + ((x - this.x0) / (this.x1 - this.x0)) * (this.right - this.left); }

  py(y) {
    if (y === null || !Number.isFinite(y) || (this.log && y <= 0)) return NaN;
    return this.bottom - (((this.log ? Math.log10(y) : y) - this.y0) / (this.y1 - this.y0)) * (this.bottom - this.top);
  }

  draw() {
    const [pen, w, h] = fit(this.canvas);
    Object.assign(this, { left: 56, right: w - 8, top: 8, bottom: h - 22 });
    pen.font = "11px system-ui, sans-serif";
    pen.lineWidth = 1;
    for (const t of ticks(this.x0, this.x1)) {
      pen.strokeStyle = "#eee"; pen.fillStyle = "#555"; pen.textAlign = "center";
      pen.beginPath(); pen.moveTo(this.px(t), this.top); pen.lineTo(this.px(t), this.bottom); pen.stroke();
      if (this.px(t) < this.right - 8 - 7 * this.xName.length) pen.fillText(number(t), this.px(t), h - 8);
    }
    const levels = this.log ? ticks(this.y0, this.y1, 4).filter(Number.isInteger).map((e) => 10 ** e) : ticks(this.y0, this.y1, 4);
    pen.textAlign = "right";
    for (const v of levels) {
      pen.strokeStyle = "#eee";
      pen.beginPath(); pen.moveTo(this.left, this.py(v)); pen.lineTo(this.right, this.py(v)); pen.stroke();
      pen.fillText(number(v), this.left - 5, this.py(v) + 4);
    }
    pen.fillText(this.xName, this.right, h - 8);
    for (const curve of this.curves) {
      pen.strokeStyle = pen.fillStyle = curve.colour;
      if (curve.low) {
        pen.globalAlpha = 0.2;
        pen.beginPath();
        curve.low.forEach((v, i) => pen.lineTo(this.px(this.xs[i]), this.py(v)));
        for (let i = this.xs.length - 1; i >= 0; i--) pen.lineTo(this.px(this.xs[i]), this.py(curve.high[i]));
        pen.fill();
        pen.globalAlpha = 1;
      }
      pen.lineWidth = curve.thin ? 0.6 : 1.4;
      pen.beginPath();
      let drawn = false, before = NaN;
      curve.y.forEach((v, i) => {
        const y = this.py(v), jump = curve.wrap && Math.abs(v - before) > Math.PI;
        if (Number.isNaN(y) || jump) drawn = false;
        if (!Number.isNaN(y)) { if (drawn) pen.lineTo(this.px(this.xs[i]), y); else pen.moveTo(this.px(this.xs[i]), y); drawn = true; }
        before = v;
      });
      pen.stroke();
    }
  }

  cursor(k) {
    const [pen] = fit(this.overlay);
    pen.strokeStyle = "#333";
    pen.beginPath(); pen.moveTo(this.px(this.xs[k]), this.top); pen.lineTo(this.px(this.xs[k]), this.bottom); pen.stroke();
    if (this.curves.length <= 8) this.readout.textContent = this.curves.map((c) => number(c.y[k])).join("  ");
    for (const curve of this.curves.slice(0, 8)) {
      const y = this.py(curve.y[k]);
      if (Number.isNaN(y) || curve.wrap) continue;
      pen.fillStyle = curve.colour;
      pen.beginPath(); pen.arc(this.px(this.xs[k]), y, 3, 0, 7); pen.fill();
    }
  }
}
