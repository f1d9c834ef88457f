// Canvases that are sharp on every screen, places in plots, and step axes.

import { clamp, formatStep, roundTicks } from "./format.js";

/** Gives a canvas a size in CSS pixels. @returns a context that draws in CSS pixels */
export function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [pixelWidth, pixelHeight] = [width, height].map((side) => Math.round(side * ratio));
  if (canvas.width !== pixelWidth) canvas.width = pixelWidth;
  if (canvas.height !== pixelHeight) canvas.height = pixelHeight;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** Begins a part that draws inside of a rectangle only; `restore()` of the context ends it. */
export function clip(context, x, y, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
}

export function setText(context, theme, align, baseline) {
  context.font = theme.smallFont;
  context.fillStyle = theme.muted;
  context.textAlign = align;
  context.textBaseline = baseline;
}

export function drawFrame(context, theme, { x, y, width, height }) {
  context.strokeStyle = theme.line;
  context.lineWidth = 1;
  context.strokeRect(x - 0.5, y - 0.5, width + 1, height + 1);
}

// Places in a plot, whose `box` is in CSS pixels, and the steps and rows of its view there.

export function xOf(box, { step0, step1 }, step) {
  return box.x + ((step - step0) / (step1 - step0)) * box.width;
}

export function stepAt(box, { step0, step1 }, x) {
  return step0 + ((x - box.x) / box.width) * (step1 - step0);
}

export function yOf(box, { row0, row1 }, row) {
  return box.y + ((row - row0) / (row1 - row0)) * box.height;
}

export function rowAt(box, { row0, row1 }, y) {
  return Math.floor(row0 + ((y - box.y) / box.height) * (row1 - row0));
}

export function isInside(box, x, y) {
  return x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height;
}

export function drawStepAxis(context, theme, box, view, title = "") {
  const steps = roundTicks(view.step0, view.step1, box.width / 80, true);
  drawTicks(context, theme, box, steps.map((step) => ({ x: xOf(box, view, step), text: formatStep(step) })));
  context.textAlign = "right";
  context.fillText(title, box.x - 28, box.y + box.height + 6);
}

/** Ticks below a plot, with texts that do not reach far beyond its ends: `left` and `right` pixels. */
export function drawTicks(context, theme, box, ticks, left = 8, right = 2) {
  setText(context, theme, "center", "top");
  context.strokeStyle = theme.line;
  const bottom = box.y + box.height;
  for (const { x, text } of ticks) {
    line(context, x, bottom, x, bottom + 4);
    const half = context.measureText(text).width / 2;
    context.fillText(text, clamp(x, box.x + half - left, box.x + box.width - half + right), bottom + 6);
  }
}

/** A dotted line at each step at which the run was resumed. */
export function drawResumed(context, theme, box, view, steps) {
  context.strokeStyle = theme.text;
  for (const step of steps) drawStep(context, box, view, step, [2, 3]);
}

export function drawStep(context, box, view, step, dash = []) {
  const x = xOf(box, view, step);
  if (x >= box.x && x <= box.x + box.width) line(context, x, box.y, x, box.y + box.height, dash);
}

/** Fills a polygon, whose corners are relative to a place. */
export function drawShape(context, x, y, corners) {
  context.beginPath();
  for (const [dx, dy] of corners) context.lineTo(x + dx, y + dy);
  context.closePath();
  context.fill();
}

export function line(context, x0, y0, x1, y1, dash = []) {
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
  context.setLineDash([]);
}

/** A text, or as much of its end as fits, which tells layers apart. */
export function fitText(context, text, width) {
  let shown = text;
  for (let at = 1; at < text.length && context.measureText(shown).width > width; at++) shown = `…${text.slice(at)}`;
  return shown;
}
