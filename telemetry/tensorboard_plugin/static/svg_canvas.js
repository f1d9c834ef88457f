// Stands in for a canvas and its context: what is drawn becomes SVG.

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

  setAttribute() {} // of the canvas that it stands in for
}

/** An SVG file. @returns {string} */
export function svgFile(width, height, background, nodes) {
  const root = create("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  root.append(create("rect", { width, height, fill: background }), ...nodes);
  return new XMLSerializer().serializeToString(root);
}

/** What was drawn on a canvas, at a place. */
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

/** Without what XML forbids, and with thin spaces as others. */
function xmlText(text) {
  // eslint-disable-next-line no-control-regex
  return text.toWellFormed().replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "�");
}
