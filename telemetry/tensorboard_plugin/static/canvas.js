// Canvases that are sharp on every screen, places in plots, and step axes.

import { formatStep } from "./format.js";

let chosenRatio = null;

/** Calls a function that draws canvases with so many pixels in a CSS pixel, whatever the screen has. */
export function drawAt(ratio, draw) {
  chosenRatio = ratio;
  try {
    draw();
  } finally {
    chosenRatio = null;
  }
}

/** Gives a canvas a size in CSS pixels. @returns a context that draws in CSS pixels */
export function prepare(canvas, width, height) {
  const ratio = chosenRatio ?? (window.devicePixelRatio || 1);
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

/** Round numbers between two ends, at most `count` or so. */
export function roundTicks(low, high, count, whole) {
  const rough = (high - low) / Math.max(count, 1);
  if (!(rough > 0) || !Number.isFinite(rough)) return [];
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  let stride = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  if (whole) stride = Math.max(1, Math.round(stride));
  const ticks = [];
  for (let tick = Math.ceil(low / stride - 1e-9) * stride; tick <= high + stride * 1e-9;) {
    ticks.push(Math.abs(tick) < stride * 1e-9 ? 0 : tick);
    tick += stride;
  }
  return ticks;
}

/**
 * Round numbers between two positive ones, at most `count` or so: powers of ten, or with twos and
 * fives between them where there are few.
 */
export function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const inside = (factors, stride, offset = 0) => {
    const found = [];
    for (let power = first + offset; power <= last; power += stride) {
      for (const factor of factors) found.push(Number(`${factor}e${power}`));
    }
    return found.filter((tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9));
  };
  const choices = [inside([1, 2, 5], 1), inside([1, 3], 1)];
  for (let stride = 1; stride <= last - first; stride++) {
    for (let offset = 0; offset < stride; offset++) choices.push(inside([1], stride, offset));
  }
  const fitting = choices.find((ticks) => ticks.length >= 2 && ticks.length <= Math.max(count, 2));
  return fitting ?? roundTicks(low, high, count, false).filter((tick) => tick > 0);
}

/** Begins a part that draws inside of a rectangle only; `restore()` of the context ends it. */
export function clip(context, x, y, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
}

/** Prepares the small muted text of axes. */
export function setText(context, theme, align, baseline) {
  context.font = theme.smallFont;
  context.fillStyle = theme.muted;
  context.textAlign = align;
  context.textBaseline = baseline;
}

/** Draws the frame of a plot. */
export function drawFrame(context, theme, { x, y, width, height }) {
  context.strokeStyle = theme.line;
  context.lineWidth = 1;
  context.strokeRect(x - 0.5, y - 0.5, width + 1, height + 1);
}

/** The place of a step in a plot. */
export function xOf(box, { step0, step1 }, step) {
  return box.x + ((step - step0) / (step1 - step0)) * box.width;
}

/** The step at a place in a plot. */
export function stepAt(box, { step0, step1 }, x) {
  return step0 + ((x - box.x) / box.width) * (step1 - step0);
}

/** The place of a row in a plot. */
export function yOf(box, { row0, row1 }, row) {
  return box.y + ((row - row0) / (row1 - row0)) * box.height;
}

/** The row at a place in a plot. */
export function rowAt(box, { row0, row1 }, y) {
  return Math.floor(row0 + ((y - box.y) / box.height) * (row1 - row0));
}

/** Whether a place is in a plot. */
export function isInside(box, x, y) {
  return x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height;
}

/** Steps below a plot. `box`: the plot's place in CSS pixels. */
export function drawStepAxis(context, theme, box, view, title = "") {
  setText(context, theme, "left", "top");
  context.strokeStyle = theme.line;
  const bottom = box.y + box.height;
  for (const tick of roundTicks(view.step0, view.step1, box.width / 80, true)) {
    const x = xOf(box, view, tick);
    line(context, x, bottom, x, bottom + 4);
    const text = formatStep(tick);
    const half = context.measureText(text).width / 2;
    context.fillText(text, clamp(x - half, box.x - 12, box.x + box.width - 2 * half + 2), bottom + 6);
  }
  context.textAlign = "right";
  context.fillText(title, box.x - 28, bottom + 6);
}

/** A dotted line at each step at which the run was resumed. */
export function drawResumed(context, theme, box, view, steps) {
  context.strokeStyle = theme.text;
  context.setLineDash([2, 3]);
  for (const step of steps) {
    const x = xOf(box, view, step);
    if (x >= box.x && x <= box.x + box.width) line(context, x, box.y, x, box.y + box.height);
  }
  context.setLineDash([]);
}

export function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

/** A number, or the end of a range that is nearest to it; the lower end of a range without room. */
export function clamp(value, low, high) {
  return Math.max(Math.min(value, high), low);
}

const IDENTIFIER = /^[A-Za-z_]\w*$/;

/**
 * A text, shortened to what fits. Of a path, parts without a number go first, from the front:
 * numbers and the end tell layers apart. Then both ends of the text are kept.
 */
export function fitText(context, text, width) {
  const fits = (shown) => context.measureText(shown).width <= width;
  const parts = text.split(".");
  for (let at = 0; at < parts.length; at++) {
    const path = parts.join(".").replace(/\.?(…\.)+/g, "…");
    if (fits(path)) return path;
    if (at < parts.length - 1 && IDENTIFIER.test(parts[at])) parts[at] = "…";
  }
  const most = Math.ceil((1.3 * text.length * width) / context.measureText(text).width);
  for (let count = Math.min(most, text.length - 1); count > 0; count--) {
    const shown = `${text.slice(0, Math.floor(count * 0.4))}…${text.slice(text.length - Math.ceil(count * 0.6))}`;
    if (fits(shown)) return shown;
  }
  return "";
}
