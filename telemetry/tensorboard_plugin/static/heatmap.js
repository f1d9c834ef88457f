// The picture: layers × steps on a canvas, with brackets for groups, alert marks and a cursor.

import { clip, drawStepAxis, fitText, line, prepare, setText, xOf } from "./canvas.js";
import { encode, palette } from "./scale.js";
import { columnAt, endOf, rowOf } from "./field.js";
import { paint } from "./heatmap_pixels.js";
import { bracketsOf, rowsByLayer } from "./rows.js";
import { memo } from "./state.js";

export const AXIS_HEIGHT = 24;
export const TOP = 18;
const LABEL_HEIGHT = 12;
const BRACKET_WIDTH = 14;
const MAX_BRACKETS = 3;
export const RIGHT = 10;

/**
 * @typedef {Object} View visible part; rows and steps may be fractions
 * @property {number} step0
 * @property {number} step1
 * @property {number} row0
 * @property {number} row1
 */

export class Heatmap {
  /**
   * @param {HTMLElement} node holds two canvases: for the cells, and for what lies above them
   * @param {Object} on `select(layer, step)`, `hover(cell | null)`, `zoom(view)`, `pan(dx, dy)`,
   *   `unzoom()`, `fold(path)`
   */
  constructor(node, on) {
    Object.assign(this, { node, on });
    [this.cells, this.overlay] = node.children;
    this.content = null;
    this.hover = null;
    this.drag = null;
    this.encode = memo(encode);
    this.paint = memo(paintedCells); // most of a redraw, and a new selection changes none of it
  }

  /**
   * @param {Object} content `field`, `values`, `rowValues`, `scale`, `rows`, `grouping`, `alerts`,
   *   `view`, `selection`, `theme`, `width`, `height`, `gutter`
   */
  draw(content) {
    this.content = content;
    const { theme, width, height } = content;
    this.rowOf = rowsByLayer(content.rows);
    this.box = {
      x: content.gutter,
      y: TOP,
      width: Math.max(width - content.gutter - RIGHT, 40),
      height: height - TOP - AXIS_HEIGHT,
    };
    this.node.style.width = `${width}px`;
    this.node.style.height = `${height}px`;
    this.node.dataset.plot = [this.box.x, this.box.y, this.box.width, this.box.height].join(",");
    const context = prepare(this.cells, width, height);
    this.#drawCells(context);
    this.#drawGutter(context);
    drawStepAxis(context, theme, this.box, content.view, "step");
    this.#drawAlerts(context);
    this.drawOverlay();
  }

  /** Cursor, selection and the rectangle that is being dragged: drawn without the cells. */
  drawOverlay() {
    if (!this.content) return;
    const { theme, width, height, selection } = this.content;
    const context = prepare(this.overlay, width, height);
    if (this.hover) this.#drawCursor(context, this.hover, theme.muted);
    if (selection && selection.layer !== null) this.#drawSelection(context, selection);
    if (this.drag) {
      const { x, y, width: w, height: h } = this.drag;
      context.fillStyle = "rgba(128, 160, 255, 0.25)";
      context.strokeStyle = theme.accent;
      context.fillRect(x, y, w, h);
      context.strokeRect(x + 0.5, y + 0.5, w, h);
    }
  }

  /** The cell under a point, in CSS pixels of this element; null outside of the cells. */
  cellAt(x, y) {
    const { box, content } = this;
    if (!content || x < box.x || x >= box.x + box.width) return null;
    if (y < box.y || y >= box.y + box.height) return null;
    const { view, rows, field } = content;
    const row = this.rowAtY(y);
    const at = view.step0 + ((x - box.x) / box.width) * (view.step1 - view.step0);
    const column = columnAt(field.steps, Math.max(at, field.steps[0] ?? 0));
    if (row < 0 || row >= rows.length || column < 0 || at >= endOf(field.steps)) return null;
    return { row, layer: this.#standsFor(row, column), step: field.steps[column], column };
  }

  /** The layer whose value a row shows. */
  #standsFor(row, column) {
    const { rows, field, values, rowValues } = this.content;
    const { layers } = rows[row];
    const shown = rowValues[column * rows.length + row];
    const isIt = (layer) => Object.is(values[column * field.rows + rowOf(field, layer)], shown);
    return layers.length > 1 ? (layers.find(isIt) ?? layers[0]) : layers[0];
  }

  /** The group whose bracket or label is under a point; null without one. */
  groupAt(x, y) {
    const { box, content } = this;
    if (!content || x >= box.x || y < box.y || y >= box.y + box.height) return null;
    const row = this.rowAtY(y);
    const folded = content.rows[row]?.folded;
    if (folded) return folded;
    const depth = this.#bracketAreaWidth() ? Math.floor(x / BRACKET_WIDTH) + 1 : 0;
    const found = this.brackets.filter((b) => b.first <= row && row <= b.last);
    return found.find((bracket) => bracket.depth === depth)?.path ?? null;
  }

  rowAtY(y) {
    const { view } = this.content;
    return Math.floor(view.row0 + ((y - this.box.y) / this.box.height) * (view.row1 - view.row0));
  }

  #x(step) {
    return xOf(this.box, this.content.view, step);
  }

  #y(row) {
    const { view } = this.content;
    return this.box.y + ((row - view.row0) / (view.row1 - view.row0)) * this.box.height;
  }

  #drawCells(context) {
    const { field, rows, rowValues, view, scale, theme } = this.content;
    const ratio = this.cells.width / this.content.width;
    const [x, y, width, height] = Object.values(this.box).map((s) => Math.round(s * ratio));
    if (width < 1 || height < 1) return;
    const codes = this.encode(scale, rowValues);
    const { step0, step1, row0, row1 } = view;
    const of = [field.steps, rows.length, scale.diverging, theme.missing];
    context.putImageData(this.paint(width, height, codes, ...of, step0, step1, row0, row1), x, y);
  }

  #bracketAreaWidth() {
    const deepest = Math.max(0, ...this.brackets.map((bracket) => bracket.depth));
    return Math.min(deepest, MAX_BRACKETS) * BRACKET_WIDTH;
  }

  #drawGutter(context) {
    const { rows, grouping, theme } = this.content;
    this.brackets = bracketsOf(rows, grouping);
    const left = this.#bracketAreaWidth();
    clip(context, 0, this.box.y - 2, this.box.x, this.box.height + 4);
    for (const bracket of this.brackets) this.#drawBracket(context, bracket);
    this.#drawLabels(context, left);
    context.restore();
    context.strokeStyle = theme.line;
    context.strokeRect(this.box.x - 0.5, this.box.y - 0.5, this.box.width + 1, this.box.height + 1);
  }

  #drawBracket(context, bracket) {
    if (bracket.depth > MAX_BRACKETS) return;
    const { theme } = this.content;
    const x = (bracket.depth - 1) * BRACKET_WIDTH + 5;
    const top = this.#y(bracket.first) + 1;
    const bottom = this.#y(bracket.last + 1) - 1;
    if (bottom < this.box.y || top > this.box.y + this.box.height) return;
    context.strokeStyle = theme.muted;
    context.lineWidth = 1.5;
    context.globalAlpha = 0.7;
    line(context, x, top, x, Math.max(bottom, top + 1));
    context.globalAlpha = 1;
    if (bottom - top < 8) return;
    context.fillStyle = theme.muted;
    const y = Math.max(top, this.box.y);
    context.beginPath();
    context.moveTo(x - 4, y);
    context.lineTo(x + 4, y);
    context.lineTo(x, y + 6);
    context.fill();
  }

  /** Names as they fit: the selected row's, those with alerts, the ends, then evenly spread ones. */
  #drawLabels(context, left) {
    const { view, rows, alerts, selection } = this.content;
    const first = Math.floor(view.row0);
    const end = Math.min(Math.ceil(view.row1), rows.length);
    const stride = Math.max(1, Math.floor((LABEL_HEIGHT * (view.row1 - view.row0)) / this.box.height));
    const wanted = [selection, ...alerts].map((at) => this.rowOf.get(at?.layer));
    wanted.push(first, end - 1);
    for (let row = first + stride; row < end; row += stride) wanted.push(row);
    const taken = [];
    const [top, bottom] = [this.box.y + LABEL_HEIGHT / 2, this.box.y + this.box.height - LABEL_HEIGHT / 2];
    for (const row of wanted) {
      if (!(row >= first && row < end)) continue;
      const y = Math.min(Math.max(this.#y(row + 0.5), top), bottom);
      if (taken.some((other) => Math.abs(other - y) < LABEL_HEIGHT - 1)) continue;
      taken.push(y);
      this.#drawLabel(context, left, row, y);
    }
  }

  #drawLabel(context, left, index, y) {
    const { rows, theme, gutter, selection } = this.content;
    const row = rows[index];
    const isSelected = selection && row.layers.includes(selection.layer);
    setText(context, theme, "right", "middle");
    const mark = row.folded ? "▸ " : "";
    const room = gutter - left - 14;
    const typeWidth = context.measureText(row.type).width;
    const withType = gutter > 150 && context.measureText(mark + row.label).width + typeWidth < room;
    context.fillStyle = isSelected ? theme.accent : theme.text;
    context.fillText(fitText(context, mark + row.label, room), gutter - 8, y);
    if (withType) {
      context.textAlign = "left";
      context.fillStyle = theme.muted;
      context.fillText(row.type, left + 4, y);
    }
  }

  #drawAlerts(context) {
    const { alerts, theme } = this.content;
    for (const alert of alerts) {
      const x = this.#x(alert.step);
      if (x < this.box.x - 1 || x > this.box.x + this.box.width + 1) continue;
      const row = this.rowOf.get(alert.layer);
      const y = row === undefined ? this.box.y : this.#y(row + 0.5);
      if (y < this.box.y - 1 || y > this.box.y + this.box.height + 1) continue;
      drawAlertMark(context, theme, alert, x, y);
    }
  }

  #drawCursor(context, { step, row }, color) {
    const { box } = this;
    const [x, y] = [this.#x(step), this.#y(row + 0.5)];
    context.strokeStyle = color;
    context.lineWidth = 1;
    context.setLineDash([3, 3]);
    if (x >= box.x && x <= box.x + box.width) line(context, x, box.y, x, box.y + box.height);
    if (y >= box.y && y <= box.y + box.height) line(context, box.x, y, box.x + box.width, y);
    context.setLineDash([]);
  }

  #drawSelection(context, { layer, step }) {
    const { field, theme, view } = this.content;
    const row = this.rowOf.get(layer);
    if (row === undefined) return;
    const column = Math.max(columnAt(field.steps, step), 0);
    const next = field.steps[column + 1] ?? endOf(field.steps);
    if (next <= view.step0 || field.steps[column] >= view.step1) return;
    if (row + 1 <= view.row0 || row >= view.row1) return;
    const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
    const left = clamp(this.#x(field.steps[column]), this.box.x - 3, this.box.x + this.box.width);
    const right = clamp(this.#x(next), left, this.box.x + this.box.width);
    const [top, bottom] = [this.#y(row), this.#y(row + 1)];
    const grow = (start, end) => (end - start < 7 ? (7 - (end - start)) / 2 : 0);
    const [dx, dy] = [grow(left, right), grow(top, bottom)];
    for (const [color, inset] of [["#ffffff", 0], ["#000000", -1.5]]) {
      context.strokeStyle = color;
      context.lineWidth = 1.5;
      context.strokeRect(
        left - dx + inset,
        top - dy + inset,
        right - left + 2 * dx - 2 * inset,
        bottom - top + 2 * dy - 2 * inset,
      );
    }
    context.fillStyle = theme.accent;
    context.fillRect(left - 0.5, this.box.y + this.box.height, Math.max(right - left, 2), 3);
  }
}

/** A diamond for an error, a triangle for a warning, a dot for a note; its border shows anywhere. */
function drawAlertMark(context, theme, alert, x, y) {
  context.beginPath();
  if (alert.severity === "note") {
    context.arc(x, y, 4, 0, 2 * Math.PI);
  } else if (alert.severity === "error") {
    [[0, -6], [6, 0], [0, 6], [-6, 0]].forEach(([dx, dy]) => context.lineTo(x + dx, y + dy));
  } else {
    [[0, -6], [6, 5], [-6, 5]].forEach(([dx, dy]) => context.lineTo(x + dx, y + dy));
  }
  context.closePath();
  context.fillStyle = theme[alert.severity];
  context.fill();
  context.lineWidth = 1.5;
  context.strokeStyle = "#ffffff";
  context.stroke();
}

function paintedCells(width, height, codes, steps, rowCount, diverging, missing, step0, step1, row0, row1) {
  const image = new ImageData(width, height);
  paint(image, steps, codes, palette(diverging, missing), rowCount, { step0, step1, row0, row1 }, diverging);
  return image;
}
