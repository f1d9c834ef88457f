// Feature maps and filters of a layer: a strip over steps, and one of them enlarged and numbered.

import { element } from "./dom.js";
import { formatStep } from "./format.js";

const GAP = 48; // the gray between maps, which `telemetry.measure.images` draws

/**
 * @param {Object} picture `kind`, `name`, `steps`
 * @param {number} chosen index of the step that is marked
 * @param {(step: number) => string} urlOf
 * @param {(index: number) => void} onEnlarge
 */
export function filmOf({ kind, name, steps }, chosen, urlOf, onEnlarge) {
  const frame = (step, index) =>
    element(
      "button",
      {
        "aria-label": `Enlarge ${kind} of ${name} at step ${step}`,
        "aria-current": index === chosen ? "true" : null,
        onclick: () => onEnlarge(index),
      },
      element("img", { src: urlOf(step), alt: "", loading: "lazy" }),
      formatStep(step),
    );
  return element("div", { class: "film" }, ...Array.from(steps, frame));
}

/** A picture as large as there is room, its maps numbered from 0 as their channels are. */
export function enlarged(url, alt, width, height) {
  const canvas = element("canvas", { role: "img", "aria-label": alt });
  const image = new Image();
  image.onload = () => drawNumbered(canvas, image, width, height);
  image.src = url;
  return canvas;
}

function drawNumbered(canvas, image, width, height) {
  const scale = Math.max(Math.min(width / image.width, height / image.height), 0.5);
  [canvas.width, canvas.height] = [image.width * scale, image.height * scale];
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  const { data } = pixelsOf(image);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const isGap = (x, y) => data[4 * (y * image.width + x)] === GAP;
  const count = (length, at) => Array.from({ length }, (_, i) => i).filter(at);
  const everyX = (y) => count(image.width, (x) => isGap(x, y)).length === image.width;
  const everyY = (x) => count(image.height, (y) => isGap(x, y)).length === image.height;
  const [rows, columns] = [count(image.height, everyX), count(image.width, everyY)];
  const isGrid = rows[0] === 0 && columns[0] === 0;
  if (!isGrid) return;
  const starts = (gaps, end) => gaps.filter((gap, i) => gap < end - 1 && gaps[i + 1] !== gap + 1);
  const size = 12;
  context.font = `${size}px system-ui, sans-serif`;
  context.textBaseline = "top";
  let number = 0;
  for (const y of starts(rows, image.height)) {
    for (const x of starts(columns, image.width)) {
      if ([1, 2, 3, 4].every((dx) => isGap(x + dx, y + 1))) continue; // behind the last map
      const [left, top] = [(x + 1) * scale, (y + 1) * scale];
      const text = String(number++);
      context.fillStyle = "rgb(0 0 0 / 65%)";
      context.fillRect(left, top, context.measureText(text).width + 4, size + 2);
      context.fillStyle = "#ffffff";
      context.fillText(text, left + 2, top + 1);
    }
  }
}

function pixelsOf(image) {
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  return context.getImageData(0, 0, image.width, image.height);
}
