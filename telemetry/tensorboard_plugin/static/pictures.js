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

/**
 * A picture as large as there is room, its maps numbered from 0 as their channels are.
 * @param {number} [least] so many maps there are at least
 */
export function enlarged(url, alt, width, height, least = 0) {
  const canvas = element("canvas", { role: "img", "aria-label": alt });
  const image = new Image();
  image.onload = () => {
    const count = drawNumbered(canvas, image, width, height, least);
    if (count) canvas.setAttribute("aria-label", `${alt}, numbered 0 to ${count - 1}`);
  };
  image.src = url;
  return canvas;
}

/** @returns {number} how many maps there are; 0: there is no grid of them */
function drawNumbered(canvas, image, width, height, least) {
  const scale = Math.max(Math.min(width / image.width, height / image.height), 0.5);
  [canvas.width, canvas.height] = [image.width * scale, image.height * scale];
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  const { data } = pixelsOf(image);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const isGap = (x, y) => data[4 * (y * image.width + x)] === GAP;
  const isGray = (x0, x1, y0, y1) => {
    for (let y = y0; y < y1; y++) for (let x = x0; x < x1; x++) if (!isGap(x, y)) return false;
    return true;
  };
  // A single map may have the gap's gray anywhere: the regular distances of the gaps identify them.
  const tall = period(image.height, (y) => isGray(0, image.width, y, y + 1));
  const wide = period(image.width, (x) => isGray(x, x + 1, 0, image.height));
  if (!tall || !wide) return 0;
  const columns = (image.width - 1) / wide;
  const corner = (number) => [(number % columns) * wide, Math.floor(number / columns) * tall];
  let count = (columns * (image.height - 1)) / tall;
  const isEmpty = ([x, y]) => isGray(x, x + wide, y, y + tall);
  while (count > least && isEmpty(corner(count - 1))) count -= 1; // places behind the last map
  const size = 12;
  context.font = `${size}px system-ui, sans-serif`;
  context.textBaseline = "top";
  for (let number = 0; number < count; number++) {
    const [left, top] = corner(number).map((place) => (place + 1) * scale);
    context.fillStyle = "rgb(0 0 0 / 65%)";
    context.fillRect(left, top, context.measureText(String(number)).width + 4, size + 2);
    context.fillStyle = "#ffffff";
    context.fillText(String(number), left + 2, top + 1);
  }
  return count;
}

/** The smallest distance at which all lines of a picture, to its very end, are gaps; 0 without one. */
function period(length, isGap) {
  const gaps = Array.from({ length }, (_, place) => isGap(place));
  const isPeriod = (step) => (length - 1) % step === 0 && gaps.every((gap, i) => gap || i % step);
  for (let step = 2; step < length; step++) if (isPeriod(step)) return step;
  return 0;
}

function pixelsOf(image) {
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  return context.getImageData(0, 0, image.width, image.height);
}
