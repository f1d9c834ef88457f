// Mouse, touch and keys on the picture: hover, click, drag a rectangle, wheel, move.

import {
  close, foldSelection, listOnsets, listRuns, moveAlert, moveLayer, moveStep, unzoom, zoomAtSelection,
} from "./actions.js";

const CLICK = 4; // pixels that a click may move
const THIN = 8; // a rectangle lower or narrower than this zooms in one direction only

/** @param {import("./heatmap.js").Heatmap} heatmap */
export function watchPointer(heatmap) {
  const { node } = heatmap;
  let start = null;
  const place = (event) => {
    const bounds = node.getBoundingClientRect();
    return [event.clientX - bounds.left, event.clientY - bounds.top];
  };

  node.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !heatmap.content) return;
    const [x, y] = place(event);
    const group = heatmap.groupAt(x, y);
    if (group !== null) return heatmap.on.fold(group);
    start = { x, y, moved: false, panning: event.shiftKey };
    node.setPointerCapture(event.pointerId);
  });
  node.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (start) moveDrag(heatmap, start, x, y);
    else hover(heatmap, x, y);
  });
  node.addEventListener("pointerup", (event) => {
    if (!start) return;
    const [x, y] = place(event);
    const ended = start;
    start = null;
    const rectangle = heatmap.drag;
    heatmap.drag = null;
    if (rectangle) heatmap.on.zoom(viewOf(heatmap, rectangle));
    else if (!ended.moved) click(heatmap, x, y);
    heatmap.drawOverlay();
  });
  node.addEventListener("pointercancel", () => {
    start = heatmap.drag = null;
    heatmap.drawOverlay();
  });
  node.addEventListener("pointerleave", () => hover(heatmap, -1, -1));
  node.addEventListener("dblclick", () => heatmap.on.unzoom());
  node.addEventListener("wheel", (event) => wheel(heatmap, event, place(event)), {
    passive: false,
  });
}

function click(heatmap, x, y) {
  const cell = heatmap.cellAt(x, y);
  if (cell) return heatmap.on.select(cell.layer, cell.step);
  const row = x < heatmap.box.x ? heatmap.content.rows[heatmap.rowAtY(y)] : null;
  if (row) heatmap.on.select(row.layers[0], null);
}

/** Repeats the hover after a redraw. */
export function hoverAgain(heatmap) {
  if (heatmap.pointer) hover(heatmap, ...heatmap.pointer);
}

function hover(heatmap, x, y) {
  heatmap.pointer = x < 0 ? null : [x, y];
  const cell = heatmap.cellAt(x, y);
  const label = x >= 0 && x < (heatmap.box?.x ?? 0) ? heatmap.groupAt(x, y) : null;
  heatmap.node.style.cursor = label !== null ? "pointer" : cell ? "crosshair" : "default";
  heatmap.hover = cell;
  const bounds = heatmap.node.getBoundingClientRect();
  heatmap.on.hover(cell, bounds.left + x, bounds.top + y, label);
  heatmap.drawOverlay();
}

function moveDrag(heatmap, start, x, y) {
  if (Math.abs(x - start.x) > CLICK || Math.abs(y - start.y) > CLICK) start.moved = true;
  if (!start.moved) return;
  if (start.panning) {
    heatmap.on.pan((start.x - x) / heatmap.box.width, (start.y - y) / heatmap.box.height);
    [start.x, start.y] = [x, y];
    return;
  }
  const { box } = heatmap;
  const clampX = (value) => Math.min(Math.max(value, box.x), box.x + box.width);
  const clampY = (value) => Math.min(Math.max(value, box.y), box.y + box.height);
  const [left, right] = [clampX(Math.min(start.x, x)), clampX(Math.max(start.x, x))];
  const [top, bottom] = [clampY(Math.min(start.y, y)), clampY(Math.max(start.y, y))];
  const [flat, thin] = [bottom - top < THIN, right - left < THIN];
  heatmap.drag = {
    x: thin ? box.x : left,
    y: flat ? box.y : top,
    width: thin ? box.width : right - left,
    height: flat ? box.height : bottom - top,
  };
  if (flat && thin) heatmap.drag = null;
  heatmap.hover = null;
  heatmap.on.hover(null);
  heatmap.drawOverlay();
}

/** The part of the picture inside of a rectangle, to whole rows. */
function viewOf({ box, content: { view } }, { x, y, width, height }) {
  const [steps, rows] = [view.step1 - view.step0, view.row1 - view.row0];
  return {
    step0: view.step0 + ((x - box.x) / box.width) * steps,
    step1: view.step0 + ((x + width - box.x) / box.width) * steps,
    row0: Math.floor(view.row0 + ((y - box.y) / box.height) * rows + 1e-6),
    row1: Math.ceil(view.row0 + ((y + height - box.y) / box.height) * rows - 1e-6),
  };
}

function wheel(heatmap, event, [x, y]) {
  const { box, content } = heatmap;
  if (!content || !content.isZoomed || event.ctrlKey || event.metaKey) {
    if (!(event.ctrlKey || event.metaKey) || !content) return; // the page scrolls
    event.preventDefault();
    const factor = Math.exp(event.deltaY / 300);
    return heatmap.on.scale(factor, (x - box.x) / box.width, (y - box.y) / box.height);
  }
  event.preventDefault();
  heatmap.on.pan(event.deltaX / box.width, event.deltaY / box.height);
}

const FAR = 10;
const SCROLLS = /^(Page|Arrow|Home|End)/;
const SCROLLS_LIVE = /^Page/; // a report is long

/**
 * Listens everywhere but in fields and dialogs; to keys that scroll only in the picture, and there for
 * its run.
 * @param {import("./app.js").Page} page
 */
export function watchKeys(page) {
  const scrolling = page.source.isLive ? SCROLLS_LIVE : SCROLLS;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || page.message || !page.panels.length) return;
    if (event.target.closest("input, select") || document.querySelector("dialog[open]")) return;
    if (scrolling.test(event.key) && !event.target.closest(".heatmap")) return;
    const by = event.shiftKey ? FAR : 1;
    const here = (act, ...of) => {
      const { run } = event.target.closest(".panel")?.dataset ?? {};
      if (run !== undefined) page.update({ of: run === page.state.other });
      act(page, ...of);
    };
    const keys = {
      ArrowLeft: () => here(moveStep, -by),
      ArrowRight: () => here(moveStep, by),
      ArrowUp: () => here(moveLayer, -by),
      ArrowDown: () => here(moveLayer, by),
      PageUp: () => here(moveLayer, -FAR),
      PageDown: () => here(moveLayer, FAR),
      Home: () => here(moveStep, -Infinity),
      End: () => here(moveStep, Infinity),
      "+": () => zoomAtSelection(page, 0.5),
      "=": () => zoomAtSelection(page, 0.5),
      "-": () => zoomAtSelection(page, 2),
      0: () => unzoom(page),
      Escape: () => close(page),
      n: () => moveAlert(page, 1),
      p: () => moveAlert(page, -1),
      f: () => here(foldSelection),
      "/": () => page.searchLayers(),
      r: () => listRuns(page, "run"),
      w: () => here(listOnsets),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}

export const KEY_HELP =
  "Keys: arrows move (with Shift by ten), + and − zoom, 0 shows everything, n and p go to the next " +
  "and previous alert, f folds the group, / filters layers, r lists the runs, w lists the layers that changed first, Esc closes.";
