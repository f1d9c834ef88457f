// Saves the view as SVG or PNG, or its numbers as CSV.

import { prepare } from "./canvas.js";
import { isThinned, rowOf } from "./field.js";
import { formatStep } from "./format.js";
import { drawScale, legendTitle, SCALE_HEIGHT, usualOf } from "./scale.js";

const MARGIN = 12;
const LINE = 20;
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
  const { theme, statistic } = app;
  const nodes = [];
  let [left, bottom] = [MARGIN, 0];
  for (const [panel, shown] of app.shown.panels) {
    const view = `steps ${formatStep(shown.view.step0)} to ${formatStep(shown.view.step1 - 1)}`;
    const title = `${panel.run} · ${legendTitle(statistic, app.mode)} · ${view}`;
    const parts = panel.drawOnto(() => new SvgCanvas(), shown);
    let top = MARGIN;
    nodes.push(placed(textLine(title, shown.width, theme, theme.text), left, top));
    top += LINE;
    for (const { canvas, legend, offset, height } of parts) {
      if (legend) nodes.push(placed(textLine(legend, shown.width, theme), left, top));
      if (legend) top += LINE;
      nodes.push(placed(canvas, left + (offset ?? 0), top));
      top += height;
    }
    left += shown.width + MARGIN;
    bottom = Math.max(bottom, top);
  }
  const scale = new SvgCanvas();
  const colors = app.shown.panels[0][1].scale;
  drawScale(scale, colors, theme, usualOf(statistic, colors));
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

const SVG = "http://www.w3.org/2000/svg";
const measuring = document.createElement("canvas").getContext("2d");
let clips = 0;

export class SvgCanvas {
  constructor() {
    this.node = create("g");
    this.style = {};
    this.dataset = {};
    this.context = new SvgContext(this);
  }

  getContext() {
    return this.context;
  }

  setAttribute() {} // part of a canvas's interface
}

/** An SVG file. @returns {string} */
export function svgFile(width, height, background, nodes) {
  const root = create("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  root.append(create("rect", { width, height, fill: background }), ...nodes);
  return new XMLSerializer().serializeToString(root);
}

/** The drawing of a canvas, moved to a place. */
export function placed(canvas, x, y) {
  canvas.node.setAttribute("transform", `translate(${x} ${y})`);
  return canvas.node;
}

/** The part of CanvasRenderingContext2D that the page uses. */
class SvgContext {
  constructor(canvas) {
    this.canvas = canvas;
    this.ratio = 1;
    this.saved = [];
    this.dash = [];
    this.globalAlpha = 1;
    this.lineWidth = 1;
    this.parent = canvas.node;
  }

  setTransform(ratio) {
    this.ratio = ratio;
  }

  clearRect() {
    this.canvas.node.replaceChildren();
    this.parent = this.canvas.node;
  }

  save() {
    this.saved.push(this.parent);
  }

  restore() {
    this.parent = this.saved.pop();
  }

  setLineDash(dash) {
    this.dash = dash;
  }

  beginPath() {
    this.path = "";
  }

  moveTo(x, y) {
    this.path += `M${round(x)} ${round(y)}`;
  }

  lineTo(x, y) {
    this.path += `${this.path ? "L" : "M"}${round(x)} ${round(y)}`;
  }

  closePath() {
    this.path += "Z";
  }

  rect(x, y, width, height) {
    this.path += `M${round(x)} ${round(y)}h${round(width)}v${round(height)}h${round(-width)}Z`;
  }

  /** Of whole circles only. */
  arc(x, y, radius) {
    this.path += `M${round(x - radius)} ${round(y)}`;
    for (const sign of [1, -1]) this.path += `a${radius} ${radius} 0 1 0 ${sign * 2 * radius} 0`;
  }

  clip() {
    const id = `clip${clips++}`;
    const clip = create("clipPath", { id });
    clip.append(create("path", { d: this.path }));
    const inside = create("g", { "clip-path": `url(#${id})` });
    this.parent.append(clip, inside);
    this.parent = inside;
  }

  stroke() {
    this.#add("path", { d: this.path, fill: "none", ...this.#stroke() });
  }

  fill() {
    this.#add("path", { d: this.path, fill: this.fillStyle });
  }

  fillRect(x, y, width, height) {
    this.#add("rect", { ...box(x, y, width, height), fill: this.fillStyle });
  }

  strokeRect(x, y, width, height) {
    this.#add("rect", { ...box(x, y, width, height), fill: "none", ...this.#stroke() });
  }

  measureText(text) {
    measuring.font = this.font;
    return measuring.measureText(text);
  }

  fillText(text, x, y) {
    const size = parseFloat(this.font);
    const down = { top: 0.8, middle: 0.35, bottom: -0.2 }[this.textBaseline] ?? 0;
    const node = this.#add("text", {
      x: round(x),
      y: round(y + down * size),
      fill: this.fillStyle,
      style: `font:${this.font}`,
      "text-anchor": { center: "middle", right: "end" }[this.textAlign] ?? "start",
    });
    node.textContent = xmlText(text);
  }

  createImageData(width, height) {
    return new ImageData(width, height);
  }

  putImageData(image, x, y) {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.width, image.height];
    canvas.getContext("2d").putImageData(image, 0, 0);
    const scaled = [x, y, image.width, image.height].map((length) => length / this.ratio);
    this.#add("image", {
      ...box(...scaled),
      href: canvas.toDataURL(),
      preserveAspectRatio: "none",
      style: "image-rendering:pixelated",
    });
  }

  #stroke() {
    return {
      stroke: this.strokeStyle,
      "stroke-width": this.lineWidth,
      ...(this.dash.length ? { "stroke-dasharray": this.dash.join(" ") } : {}),
    };
  }

  #add(tag, attributes) {
    const alpha = this.globalAlpha === 1 ? {} : { opacity: this.globalAlpha };
    const node = create(tag, { ...attributes, ...alpha });
    this.parent.append(node);
    return node;
  }
}

function create(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  return node;
}

function box(x, y, width, height) {
  const lengths = { x, y, width: Math.max(width, 0), height: Math.max(height, 0) };
  return Object.fromEntries(Object.entries(lengths).map(([name, v]) => [name, round(v)]));
}

function round(value) {
  return Math.round(value * 100) / 100;
}

/** Removes characters that XML forbids. */
function xmlText(text) {
  // eslint-disable-next-line no-control-regex
  return text.toWellFormed().replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "�");
}
