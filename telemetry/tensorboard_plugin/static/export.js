// Saves what is shown: as a picture, SVG or PNG, or its numbers as CSV.

import { prepare } from "./canvas.js";
import { isThinned, rowOf } from "./field.js";
import { formatStep } from "./format.js";
import { drawScale, legendTitle } from "./legend.js";
import { SvgCanvas, placed, svgFile } from "./svg_canvas.js";

const MARGIN = 12;
const LINE = 20;
const SCALE_HEIGHT = 34;
const PNG_SCALE = 2;

/** @param {import("./app.js").App} app */
export async function saveView(app, kind) {
  const name = `${app.state.run}-${app.statistic.name}`.replace(/[^\w.-]+/g, "_");
  if (kind === "csv") {
    const [panel, shown] = app.shown.panels[0];
    const thinned = isThinned(shown.field) ? "-thinned" : "";
    return download(`${name}${thinned}.csv`, new Blob([csvOf(panel, shown)], { type: "text/csv" }));
  }
  const { text, width, height } = pictureOf(app);
  const svg = new Blob([text], { type: "image/svg+xml" });
  if (kind === "svg") return download(`${name}.svg`, svg);
  download(`${name}.png`, await rasterized(text, width, height));
}

/** The runs side by side, as an SVG file. */
function pictureOf(app) {
  const { theme, statistic, state } = app;
  const nodes = [];
  let [left, bottom] = [MARGIN, 0];
  for (const [panel, shown] of app.shown.panels) {
    const view = `steps ${formatStep(shown.view.step0)} to ${formatStep(shown.view.step1 - 1)}`;
    const title = `${panel.run} · ${legendTitle(statistic, state.mode)} · ${view}`;
    const parts = panel.drawOnto(() => new SvgCanvas(), shown);
    let top = MARGIN;
    nodes.push(placed(textLine(title, shown.width, theme, theme.text), left, top));
    top += LINE;
    for (const { canvas, legend, beside, height } of parts) {
      if (legend) nodes.push(placed(textLine(legend, shown.width, theme), left, top));
      if (legend) top += LINE;
      nodes.push(placed(canvas, left + (beside ?? 0), top));
      top += height;
    }
    left += shown.width + MARGIN;
    bottom = Math.max(bottom, top);
  }
  const scale = new SvgCanvas();
  drawScale(scale, app.shown.panels[0][1].scale, theme);
  nodes.push(placed(scale, MARGIN, bottom + MARGIN));
  const [width, height] = [left, bottom + SCALE_HEIGHT + 2 * MARGIN];
  return { text: svgFile(width, height, theme.background, nodes), width, height };
}

function textLine(text, width, theme, color = theme.muted) {
  const canvas = new SvgCanvas();
  const context = prepare(canvas, width, LINE);
  context.font = theme.font;
  context.fillStyle = color;
  context.textBaseline = "middle";
  context.fillText(text, 0, LINE / 2);
  return canvas;
}

async function rasterized(text, width, height) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width * PNG_SCALE, height * PNG_SCALE];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

/** A line per step and layer in view, as `telemetry export` writes them. */
function csvOf(panel, { field, rows, view, statistic }) {
  const lines = [`run,step,module_name,type_name,${statistic.name}`];
  const shown = rows.slice(Math.floor(view.row0), Math.ceil(view.row1)).flatMap((r) => r.layers);
  field.steps.forEach((step, column) => {
    if (step < view.step0 || step >= view.step1) return;
    for (const layer of shown) {
      const row = rowOf(field, layer);
      const value = row < 0 ? -1 : field.values[column * field.rows + row];
      if (value < 0) continue;
      const { name, type } = panel.overview.layers[layer];
      lines.push([panel.run, step, name, type, numberText(value)].map(csvText).join(","));
    }
  });
  return `${lines.join("\n")}\n`;
}

/** As many digits as float32 needs, as in Python. */
function numberText(value) {
  if (value !== value) return "nan";
  return value === Infinity ? "inf" : String(Number(value.toPrecision(8)));
}

function csvText(value) {
  const text = String(value).replace(/[\r\n]/g, " ");
  return /[",]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
