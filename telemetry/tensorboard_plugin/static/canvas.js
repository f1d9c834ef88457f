// Canvases that are sharp on every screen, and step axes.

import { formatStep } from "./format.js";

/** Gives a canvas a size in CSS pixels. @returns a context that draws in CSS pixels */
export function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const pixelWidth = Math.round(width * ratio);
  const pixelHeight = Math.round(height * ratio);
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

/** Steps below a plot. `box`: the plot's place in CSS pixels. */
export function drawStepAxis(context, theme, box, view, title) {
  context.font = theme.smallFont;
  context.fillStyle = theme.muted;
  context.strokeStyle = theme.line;
  context.textBaseline = "top";
  const ticks = roundTicks(view.step0, view.step1, box.width / 80, true);
  for (const tick of ticks) {
    const x = box.x + ((tick - view.step0) / (view.step1 - view.step0)) * box.width;
    line(context, x, box.y + box.height, x, box.y + box.height + 4);
    const text = formatStep(tick);
    const half = context.measureText(text).width / 2;
    context.textAlign = "left";
    const left = Math.min(Math.max(x - half, box.x - 12), box.x + box.width - 2 * half + 2);
    context.fillText(text, left, box.y + box.height + 6);
  }
  if (title) {
    context.textAlign = "right";
    context.fillText(title, box.x - 28, box.y + box.height + 6);
  }
}

export function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

/** The end of a text, as much as fits: the end of a path says more than its beginning. */
export function fitText(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (context.measureText(`…${text.slice(middle)}`).width <= width) high = middle;
    else low = middle + 1;
  }
  return low < text.length ? `…${text.slice(low)}` : "";
}
