// The units, or channels, of a layer over time: how large each gets, which are dead or saturated.

import { drawStepAxis, prepare, setText, xOf } from "./canvas.js";
import { columnAt } from "./field.js";
import { formatNumber, formatStep } from "./format.js";
import { paint } from "./heatmap_pixels.js";
import { encode, makeScale, palette } from "./scale.js";

const LEFT = 58;
const ROW_HEIGHTS = [3, 14]; // of a unit
const HEIGHTS = [40, 200];

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Object} units `steps`, `count`, `extremes`, and `dead`, `saturated` as texts of each step
 * @param {Object} options `view`, `theme`, `width`, `step`
 * @returns {number} index of the described step
 */
export function drawUnits(canvas, units, { view, theme, width, step }) {
  const { steps, count, extremes } = units;
  const [least, most] = ROW_HEIGHTS.map((height) => count * height);
  const inner = Math.max(Math.min(most, HEIGHTS[0]), Math.min(least, HEIGHTS[1]));
  const context = prepare(canvas, width, inner + 30);
  const box = { x: LEFT, y: 6, width: width - LEFT - 10, height: inner };
  const sizes = sizesOf(units);
  const scale = makeScale({ log: true }, "value", [sizes]);
  const ratio = canvas.width / width;
  const [x, y, columns, rows] = [box.x, box.y, box.width, box.height].map((s) => Math.round(s * ratio));
  const image = context.createImageData(columns, rows);
  const visible = { ...view, row0: 0, row1: count };
  paint(image, steps, encode(scale, sizes), palette(false, theme.missing), count, visible, false);
  context.putImageData(image, x, y);
  context.strokeStyle = theme.line;
  context.strokeRect(box.x - 0.5, box.y - 0.5, box.width + 1, box.height + 1);
  setText(context, theme, "right", "middle");
  const middle = (unit) => box.y + ((unit + 0.5) / count) * box.height;
  for (const unit of new Set([0, count - 1])) {
    const place = Math.min(Math.max(middle(unit), box.y + 5), box.y + box.height - 5);
    context.fillText(String(unit), box.x - 6, place);
  }
  drawStepAxis(context, theme, box, view, "");
  const chosen = Math.max(columnAt(steps, step ?? Infinity), 0);
  context.fillStyle = theme.text;
  context.fillRect(xOf(box, view, steps[chosen]) - 0.5, box.y, 1, box.height);
  const read = (at, height) => {
    const unit = Math.min(Math.max(Math.floor(((height - box.y) / box.height) * count), 0), count - 1);
    const column = Math.max(columnAt(steps, at), 0);
    const [low, high] = extremes.subarray(2 * (column * count + unit));
    const text = low > high ? "omitted" : `${formatNumber(low)} to ${formatNumber(high)}`;
    const title = `Unit ${unit} at step ${formatStep(steps[column])}`;
    return { step: steps[column], title, lines: [{ label: low === 0 && high === 0 ? "dead" : "from", text }] };
  };
  canvas.plotted = { box, view, read };
  return chosen;
}

/** Text with the dead, negative and saturated units of a step, and the number of omitted ones. */
export function unitsText({ steps, count, dead, belowZero, saturated, omitted, sampled }, index) {
  return [
    `${count} units; at step ${formatStep(steps[index])} dead: ${dead[index] || "none"}`,
    belowZero[index] ? `always below zero, zero behind a ReLU: ${belowZero[index]}` : "",
    saturated[index] ? `saturated: ${saturated[index]}` : "",
    omitted[index] ? `${omitted[index]} are omitted; the largest are shown` : "",
    sampled ? "some steps are omitted" : "",
  ]
    .filter(Boolean)
    .join("; ");
}

/** The larger magnitude of each unit's extremes; −1 where it was omitted. */
function sizesOf({ extremes }) {
  return Float32Array.from({ length: extremes.length / 2 }, (_, i) => {
    const [low, high] = [extremes[2 * i], extremes[2 * i + 1]];
    return low > high ? -1 : Math.max(Math.abs(low), Math.abs(high));
  });
}
