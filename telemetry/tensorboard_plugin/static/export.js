// Saves the view as PNG, or its numbers as CSV.

import { drawAt } from "./canvas.js";
import { isThinned, rowOf } from "./field.js";
import { formatStep } from "./format.js";
import { contentsOf } from "./panel.js";

const MARGIN = 12;
const LINE = 20;
const PNG_SCALE = 2;

/** @param {import("./app.js").Page} page */
export async function saveView(page, kind) {
  const [content] = contentsOf(page);
  const name = `${page.state.run}-${page.statistic.name}`.replace(/[^\w.-]+/g, "_");
  if (kind === "png") return download(`${name}.png`, await pictureOf(page, content));
  const thinned = isThinned(content.field) ? "-thinned" : "";
  download(`${name}${thinned}.csv`, new Blob([csvOf(content)], { type: "text/csv" }));
}

/** The runs side by side as they are seen, below a line that says what they are. */
function pictureOf(page, { view }) {
  const { theme, root } = page;
  const picture = root.querySelector(".picture");
  const { left, top, width, height } = picture.getBoundingClientRect();
  const canvas = document.createElement("canvas");
  canvas.width = (width + 2 * MARGIN) * PNG_SCALE;
  canvas.height = (height + 2 * MARGIN + LINE) * PNG_SCALE;
  const context = canvas.getContext("2d");
  context.scale(PNG_SCALE, PNG_SCALE);
  context.fillStyle = theme.background;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.font = theme.font;
  context.textBaseline = "middle";
  context.fillStyle = theme.text;
  const steps = `steps ${formatStep(view.step0)} to ${formatStep(view.step1 - 1)}`;
  context.fillText(`${page.panels.map(({ name }) => name).join(", ")} · ${steps}`, MARGIN, MARGIN + LINE / 2);
  const place = (node) => {
    const box = node.getBoundingClientRect();
    return [box.left - left + MARGIN, box.top - top + MARGIN + LINE, box.width, box.height];
  };
  const seen = (selector) => [...picture.querySelectorAll(selector)].filter((node) => node.checkVisibility());
  drawAt(PNG_SCALE, () => page.drawNow());
  for (const node of seen("canvas")) context.drawImage(node, ...place(node));
  page.drawNow();
  for (const node of seen(".sample, .swatch i")) {
    context.fillStyle = getComputedStyle(node).color;
    context.fillRect(...place(node));
  }
  for (const node of seen("h2, .legend-title b, .swatch, .curve-legend span, .first-nonfinite button")) {
    const [x, y, , rowHeight] = place(node);
    const before = node.firstElementChild; // a sample
    context.fillStyle = getComputedStyle(node).color;
    context.fillText(node.textContent, x + (before ? before.offsetWidth + 5 : 0), y + rowHeight / 2);
  }
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

/** A line per step and layer in view, as `telemetry export` writes them. */
function csvOf({ panel, field, rows, view, statistic }) {
  const lines = [`run,step,module_name,type_name,${statistic.name}`];
  const shown = rows.slice(Math.floor(view.row0), Math.ceil(view.row1)).flatMap(({ layers }) => layers);
  field.steps.forEach((step, column) => {
    if (step < view.step0 || step >= view.step1) return;
    for (const layer of shown) {
      const row = rowOf(field, layer);
      const value = row < 0 ? -1 : field.values[column * field.rows + row];
      if (value < 0) continue;
      const { name, type } = panel.overview.layers[layer];
      lines.push([panel.name, step, name, type, numberText(value)].map(csvText).join(","));
    }
  });
  return `${lines.join("\n")}\n`;
}

/** All digits of a float32, as in Python. */
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
