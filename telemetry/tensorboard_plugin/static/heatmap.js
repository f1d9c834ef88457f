// The picture: layers × steps with brackets for groups and alert marks; mouse and touch on it.

import { selectIn, toggleFold, unzoom, zoomTo } from "./actions.js";
import {
  clip, drawFrame, drawResumed, drawShape, drawStepAxis, fitText, isInside, line, prepare, rowAt, setText, stepAt, xOf,
  yOf,
} from "./canvas.js";
import { columnAt, endOf, rowOf, valueAt } from "./field.js";
import { clamp, formatStep, formatValue } from "./format.js";
import { paintIn } from "./heatmap_pixels.js";
import { Plot } from "./parts.js";
import { html, useMemo, useRef, useState } from "./preact.js";
import { bracketsOf, rowOfLayer, rowsByLayer, titleOf } from "./rows.js";
import { encode, scaleText } from "./scale.js";
import { memo } from "./state.js";
import { panView, scaleView, viewOf } from "./view.js";

export const AXIS_HEIGHT = 24;
export const TOP = 18;
export const RIGHT = 10;
const LABEL_HEIGHT = 12;
const BRACKET_WIDTH = 14;
const MAX_BRACKETS = 3;
const LEAST_MARK = 7; // pixels of the mark of a selected cell
const MARKS = {
  error: [[0, -6], [6, 0], [0, 6], [-6, 0]],
  warning: [[0, -6], [6, 5], [-6, 5]],
  note: [[-2, -4], [2, -4], [4, -2], [4, 2], [2, 4], [-2, 4], [-4, 2], [-4, -2]],
};

const codesOf = memo((rowValues, scale) => encode(scale, rowValues));

/** Draws a run; see `contentsOf`. @returns {Object} the same with what lies where; see `Plot` */
function drawHeatmap(canvas, shown) {
  const { field, rows, rowValues, view, scale, theme, height, gutter, grouping } = shown;
  const width = shown.width - shown.rightOf;
  const context = prepare(canvas, width, height);
  const box = {
    x: gutter,
    y: TOP,
    width: Math.max(width - gutter - RIGHT, 40),
    height: height - TOP - AXIS_HEIGHT,
  };
  const map = { ...shown, context, box, brackets: bracketsOf(rows, grouping), rowOf: rowsByLayer(rows) };
  const depths = map.brackets.map(({ depth }) => Math.min(depth, MAX_BRACKETS));
  map.labelsLeft = Math.max(0, ...depths) * BRACKET_WIDTH;
  const codes = codesOf(rowValues, scale);
  paintIn(context, box, codes, { steps: field.steps, rowCount: rows.length, view, scale, missing: theme.missing });
  clip(context, 0, box.y - 2, box.x, box.height + 4);
  for (const bracket of map.brackets) drawBracket(map, bracket);
  drawLabels(map);
  context.restore();
  drawFrame(context, theme, box);
  drawStepAxis(context, theme, box, view, "step");
  drawResumed(context, theme, box, view, shown.resumed);
  for (const alert of shown.alerts) drawAlert(map, alert);
  if (shown.selection) drawSelection(map);
  return { ...map, isWide: true, read: (_, y, x) => read(map, x, y), yOf: (layer) => heightOf(map, layer) };
}

function drawBracket({ context, box, view, theme }, { depth, first, last }) {
  if (depth > MAX_BRACKETS) return;
  const x = (depth - 1) * BRACKET_WIDTH + 5;
  const [top, bottom] = [yOf(box, view, first) + 1, yOf(box, view, last + 1) - 1];
  if (bottom < box.y || top > box.y + box.height) return;
  context.strokeStyle = context.fillStyle = theme.muted;
  context.lineWidth = 1.5;
  line(context, x, top, x, Math.max(bottom, top + 1));
  if (bottom - top < 8) return;
  drawShape(context, x, Math.max(top, box.y), [[-4, 0], [4, 0], [0, 6]]);
}

/** Names as they fit: the selected row's, those with alerts, the ends, then evenly spread ones. */
function drawLabels(map) {
  const { box, view, rows, alerts, selection } = map;
  const first = Math.floor(view.row0);
  const end = Math.min(Math.ceil(view.row1), rows.length);
  const stride = Math.max(1, Math.floor((LABEL_HEIGHT * (view.row1 - view.row0)) / box.height));
  const wanted = [selection, ...alerts].map((at) => map.rowOf.get(at?.layer));
  wanted.push(first, end - 1);
  for (let row = first + stride; row < end; row += stride) wanted.push(row);
  const taken = [];
  for (const row of wanted) {
    if (!(row >= first && row < end)) continue;
    const y = clamp(yOf(box, view, row + 0.5), box.y + LABEL_HEIGHT / 2, box.y + box.height - LABEL_HEIGHT / 2);
    if (taken.some((other) => Math.abs(other - y) < LABEL_HEIGHT - 1)) continue;
    taken.push(y);
    drawLabel(map, rows[row], y);
  }
}

function drawLabel({ context, theme, gutter, selection, labelsLeft: left }, { label, type, folded, layers }, y) {
  setText(context, theme, "left", "middle");
  const text = (folded ? "▸ " : "") + label;
  const room = gutter - left - 14;
  const isWide = gutter > 150 && context.measureText(text).width + context.measureText(type).width < room;
  if (isWide) context.fillText(type, left + 4, y);
  context.textAlign = "right";
  context.fillStyle = layers.includes(selection?.layer) ? theme.accent : theme.text;
  context.fillText(fitText(context, text, room), gutter - 8, y);
}

/** A diamond for an error, a triangle for a warning, a dot for a note; its border shows anywhere. */
function drawAlert({ context, box, view, theme, rowOf: rowOfAlert }, { severity, step, layer }) {
  const row = rowOfAlert.get(layer);
  const [x, y] = [xOf(box, view, step), row === undefined ? box.y : yOf(box, view, row + 0.5)];
  if (x < box.x - 1 || x > box.x + box.width + 1 || y < box.y - 1 || y > box.y + box.height + 1) return;
  context.fillStyle = theme[severity];
  drawShape(context, x, y, MARKS[severity]);
  context.lineWidth = 1.5;
  context.strokeStyle = "#ffffff";
  context.stroke();
}

/** A white and a black frame around the selected cell. */
function drawSelection({ context, box, view, field: { steps }, theme, selection, rowOf: rowOfSelected }) {
  const row = rowOfSelected.get(selection.layer);
  const column = Math.max(columnAt(steps, selection.step), 0);
  const next = steps[column + 1] ?? endOf(steps);
  const isInView = row < view.row1 && row + 1 > view.row0 && steps[column] < view.step1 && next > view.step0;
  if (!isInView) return;
  const left = clamp(xOf(box, view, steps[column]), box.x - 3, box.x + box.width);
  const right = clamp(xOf(box, view, next), left, box.x + box.width);
  const [top, bottom] = [yOf(box, view, row), yOf(box, view, row + 1)];
  const [width, height] = [Math.max(right - left, LEAST_MARK), Math.max(bottom - top, LEAST_MARK)];
  const [x, y] = [(left + right - width) / 2, (top + bottom - height) / 2];
  context.lineWidth = 1.5;
  for (const [color, out] of [["#ffffff", 0], ["#000000", 1.5]]) {
    context.strokeStyle = color;
    context.strokeRect(x - out, y - out, width + 2 * out, height + 2 * out);
  }
  context.fillStyle = theme.accent;
  context.fillRect(left - 0.5, box.y + box.height, Math.max(right - left, 2), 3);
}

// --- what lies under a point, in CSS pixels of the picture

function cellAt({ box, view, rows, field, values, rowValues }, x, y) {
  if (!isInside(box, x, y)) return null;
  const [row, at] = [rowAt(box, view, y), stepAt(box, view, x)];
  const column = columnAt(field.steps, Math.max(at, field.steps[0] ?? 0));
  if (!rows[row] || column < 0 || at >= endOf(field.steps)) return null;
  // The layer whose value the row shows.
  const value = rowValues[column * rows.length + row];
  const isIt = (layer) => Object.is(values[column * field.rows + rowOf(field, layer)], value);
  const { layers } = rows[row];
  return { row, layer: layers.find(isIt) ?? layers[0], step: field.steps[column], column };
}

/** The group whose bracket or label is under a point; null without one. */
function groupAt({ box, view, rows, brackets, labelsLeft }, x, y) {
  if (!isInside({ ...box, x: 0, width: box.x }, x, y)) return null;
  const row = rowAt(box, view, y);
  const depth = labelsLeft ? Math.floor(x / BRACKET_WIDTH) + 1 : 0;
  const isIt = (bracket) => bracket.depth === depth && bracket.first <= row && row <= bracket.last;
  return rows[row]?.folded ?? brackets.find(isIt)?.path ?? null;
}

/** What the tooltip says of the name of a group, or of a cell. */
function read(map, x, y) {
  const group = groupAt(map, x, y);
  if (group !== null) {
    const isFolded = map.rows[rowAt(map.box, map.view, y)].folded;
    return { cursor: "pointer", title: group, parts: html`<span>click to ${isFolded ? "unfold" : "fold"}</span>` };
  }
  const cell = cellAt(map, x, y);
  return cell && describe(map, cell);
}

/** The middle of the row of a layer; null where it is out of view. */
export function heightOf({ panel, rows, box, view }, layer) {
  const middle = rowOfLayer(rows, panel.indexOf(layer)) + 0.5;
  return middle >= Math.max(view.row0, 0) && middle <= view.row1 ? yOf(box, view, middle) : null;
}

function describe({ panel, field, rows, values, scale, statistic }, { row, layer: index, step, column }) {
  const layer = panel.overview.layers[index];
  const { folded, type } = rows[row];
  const value = valueAt(field, index, step);
  const relative = scale.diverging ? valueAt({ ...field, values }, index, step) : -1;
  const relation = relative >= 0 && relative < Infinity ? ` (${scaleText(scale, relative)})` : "";
  const next = field.steps[column + 1];
  const until = next > step + 1 ? `, next measured at ${formatStep(next)}` : "";
  return {
    cursor: "crosshair",
    step,
    layer: layer.name,
    title: folded ? `${folded} (${type}; here ${titleOf(layer)})` : titleOf(layer),
    parts: html`<span>${layer.type} · step ${formatStep(step)}${until}</span>
      <span class=${Number.isFinite(value) ? "" : "nonfinite"}>
        ${statistic.title}: ${formatValue(statistic, value)}${relation}
      </span>`,
  };
}

// --- the picture with its mouse and touch: hover, click, drag a rectangle, wheel, move

const CLICK = 4; // pixels that a click may move
const EDGE = 1e-3; // pixels by which a place at the edge of a row may be beside it
const THIN = 8; // a rectangle lower or narrower than this zooms in one direction only

export function HeatMap({ page, shown }) {
  const own = useRef({ map: null, drag: null }).current; // what is drawn, and where a drag began
  const [rectangle, setRectangle] = useState(null); // that is being dragged
  const draw = useMemo(() => (canvas) => (own.map = drawHeatmap(canvas, shown)), [shown]);
  const end = () => {
    own.drag = null;
    setRectangle(null);
  };
  const handlers = {
    onpointerdown(event) {
      if (event.button !== 0) return;
      const { offsetX: x, offsetY: y } = event;
      const group = groupAt(own.map, x, y);
      if (group !== null) return toggleFold(page, group);
      own.drag = { x, y };
      event.currentTarget.setPointerCapture(event.pointerId);
    },
    onpointermove({ offsetX: x, offsetY: y }) {
      const { drag: start, map: { box } } = own;
      if (!start) return;
      start.hasMoved ||= Math.hypot(x - start.x, y - start.y) > CLICK;
      if (start.hasMoved) setRectangle(rectangleOf(box, start, x, y));
    },
    onpointerup() {
      const { drag: start, map: { box, view, rows, panel } } = own;
      if (!start) return;
      end();
      if (rectangle) return zoomTo(page, viewIn(rectangle, box, view));
      if (start.hasMoved) return;
      const cell = cellAt(own.map, start.x, start.y);
      const row = start.x < box.x ? rows[rowAt(box, view, start.y)] : null;
      const layer = cell?.layer ?? row?.layers[0];
      if (layer !== undefined) selectIn(page, panel, panel.overview.layers[layer].name, cell?.step ?? null);
    },
    onpointercancel: end,
    ondblclick: () => unzoom(page),
    /** Moves a zoomed picture, or with a key zooms; else the page scrolls. */
    onwheel(event) {
      const isZooming = event.ctrlKey || event.metaKey;
      if (!isZooming && page.state.zoom === null) return;
      event.preventDefault();
      const { deltaX, deltaY, offsetX, offsetY } = event;
      const { x, y, width, height } = own.map.box;
      const view = isZooming
        ? scaleView(page.view(), Math.exp(deltaY / 300), (offsetX - x) / width, (offsetY - y) / height)
        : panView(page.view(), deltaX / width, deltaY / height, page.whole());
      zoomTo(page, view);
    },
  };
  return html`<div class="heatmap" tabindex="0" role="application" aria-label="Layers over steps" ...${handlers}>
    <${Plot} class="cells" role="presentation" draw=${draw} />
    ${rectangle && html`<i class="rectangle" style=${rectangle} />`}
  </div>`;
}

/** The rectangle between two places inside of a box; over all of it in a direction in which it is thin; or null. */
function rectangleOf(box, start, endX, endY) {
  const between = (one, other, first, length) => {
    const [low, high] = [Math.min(one, other), Math.max(one, other)].map((at) => clamp(at, first, first + length));
    return high - low < THIN ? [first, length] : [low, high - low];
  };
  const [left, width] = between(start.x, endX, box.x, box.width);
  const [top, height] = between(start.y, endY, box.y, box.height);
  return width === box.width && height === box.height ? null : { left, top, width, height };
}

/** The part of a view inside of a rectangle, to whole rows. */
function viewIn({ left, top, width, height }, box, view) {
  const steps = [left, left + width].map((x) => stepAt(box, view, x));
  return viewOf(steps, [rowAt(box, view, top + EDGE), rowAt(box, view, top + height - EDGE) + 1]);
}
