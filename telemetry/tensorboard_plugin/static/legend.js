// What the colors mean.

import { element, fill } from "./dom.js";
import { prepare } from "./canvas.js";
import { INFINITE_COLORS, NAN_COLORS, ZERO_COLOR } from "./colors.js";
import { cssColor } from "./palette.js";
import { scaleTicks } from "./scale.js";

const WIDTH = 320;

/** @param {HTMLElement} node */
export function drawLegend(node, scale, statistic, mode, theme) {
  const canvas = element("canvas", { role: "img", "aria-label": "color scale" });
  drawScale(canvas, scale, theme);
  fill(
    node,
    element("span", { class: "legend-title" }, legendTitle(statistic, mode)),
    canvas,
    scale.log ? swatch([ZERO_COLOR], "0") : null,
    swatch(INFINITE_COLORS, "infinite"),
    swatch(NAN_COLORS, "NaN"),
    swatch([theme.missing], "not measured"),
  );
}

/** The color scale with its ticks. */
export function drawScale(canvas, scale, theme) {
  const context = prepare(canvas, WIDTH + 40, 30);
  for (let x = 0; x < WIDTH; x++) {
    context.fillStyle = cssColor(scale.diverging, x / (WIDTH - 1));
    context.fillRect(20 + x, 0, 1.5, 12);
  }
  context.font = theme.smallFont;
  context.fillStyle = theme.muted;
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const { place, text } of scaleTicks(scale)) {
    context.fillRect(20 + place * WIDTH - 0.5, 12, 1, 3);
    context.fillText(text, 20 + place * WIDTH, 16);
  }
}

/** What the colors show, in words. */
export function legendTitle(statistic, mode) {
  const relation = {
    own: ", relative to the layer's own median",
    depth: ", relative to the median over all layers",
  };
  return statistic.title + (relation[mode] ?? "");
}

function swatch(colors, text) {
  const background =
    colors.length > 1
      ? `repeating-linear-gradient(45deg, ${colors[0]} 0 5px, ${colors[1]} 5px 7px)`
      : colors[0];
  return element(
    "span",
    { class: "swatch" },
    element("i", { style: `background:${background}` }),
    text,
  );
}
