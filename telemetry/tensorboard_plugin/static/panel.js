// The runs side by side: loss and learning rate, the picture with its profile, curves of layers.

import { goTo, listRuns, selectIn, unzoom } from "./actions.js";
import { INFINITE_COLORS, NAN_COLORS, ZERO_COLOR } from "./colors.js";
import { costsOf, curvesOfLayers, drawCosts, drawLayerCurves, drawStrip, stripOf } from "./curves.js";
import { firstDifference, isThinned, valueAt } from "./field.js";
import { formatStep, formatValue } from "./format.js";
import { Heatmap, RIGHT } from "./heatmap.js";
import { CurveLegend, Plot, crosshair, point } from "./parts.js";
import { hoverAgain, watchPointer } from "./pointer.js";
import { html, useLayoutEffect, useRef } from "./preact.js";
import { drawProfile, profileWidth } from "./profile.js";
import { rowOfLayer, titleOf } from "./rows.js";
import { drawScale, legendTitle, scaleText, usualOf } from "./scale.js";
import { clampRows } from "./view.js";

const MIN_HEIGHT = 130; // of the picture
const ROW_HEIGHTS = [22, 38]; // where there is room: with curves below, and at most
const CURVES_HEIGHT = 190;
const AXES_HEIGHT = 42;
const AROUND_PICTURE = 300; // height of everything else that is seen at once
const NARROWEST = 400; // of two pictures next to each other
const GAP = 16;

/**
 * What is drawn of each run. All have one scale, which a zoom does not change. A ratio of two runs is
 * one picture, of the first run.
 */
export function contentsOf(page) {
  const { panels, statistic, mode, state, theme } = page;
  const view = page.view();
  const others = panels.map((_, i) => panels[1 - i]);
  const whole = panels.map((panel, i) => panel.values(panel.field(statistic), statistic, mode, others[i]));
  const shown = mode === "run" ? panels.slice(0, 1) : panels;
  const scale = page.scale(statistic.log, mode, ...whole.slice(0, shown.length));
  const contents = shown.map((panel, i) => {
    const rows = page.rows(panel);
    const field = panel.fieldIn(view, statistic, page.zoom !== null, rows);
    const values = panel.values(field, statistic, mode, others[i]);
    const layer = state.layer === null ? -1 : panel.indexOf(state.layer);
    const rowValues = panel.rowValues(field, values, rows, scale);
    const content = {
      panel, statistic, theme, mode, scale, rows, field, values, rowValues,
      view: clampRows(view, rows.length),
      isZoomed: page.zoom !== null,
      grouping: panel.groupings[state.order],
      selection: layer < 0 ? null : { layer, step: state.step ?? panel.overview.lastStep },
      cursor: state.step,
      losses: panels.flatMap(({ scalars }) => scalars.filter(({ kind }) => kind === "loss")),
      alerts: panel.alerts,
      ranges: panel.rangesOf(field.steps.length, rowValues, rows.length),
    };
    return { ...content, curves: curvesOfLayers(content) };
  });
  const [first, second] = contents;
  if (second) [first.compared, second.compared] = [second, first];
  const size = sizeOf(page, contents);
  return contents.map((content) => Object.assign(content, size));
}

function sizeOf(page, contents) {
  const hasRoom = page.width >= 2 * NARROWEST + GAP && !matchMedia("print").matches;
  const columns = contents.length > 1 && hasRoom ? 2 : 1;
  const width = Math.floor((page.width - GAP * (columns - 1)) / columns);
  const rowCount = Math.max(...contents.map(({ rows }) => rows.length));
  const room = Math.max(window.innerHeight - AROUND_PICTURE, 220);
  const below = contents.some(({ curves }) => curves.length) ? CURVES_HEIGHT : 0;
  const [small, large] = ROW_HEIGHTS.map((row) => Math.min(rowCount * row + AXES_HEIGHT, room));
  const height = Math.max(Math.min(large, Math.max(small, room - below)), MIN_HEIGHT);
  const gutter = Math.round(Math.min(Math.max(width * 0.24, Math.min(150, width * 0.36)), 250));
  const rightOf = profileWidth(width);
  return { columns, width, height, gutter, right: rightOf + RIGHT, rightOf, spare: room - height };
}

export function Picture({ page }) {
  const contents = contentsOf(page);
  const { runs, statistic, theme, mode } = page;
  const [{ scale, columns }] = contents;
  const faulty = runs.filter(({ alertCount }) => alertCount).length;
  return html`<div class="picture">
    ${runs.length > 1 && faulty > 0 && html`<button class="sweep" onclick=${() => listRuns(page, "run", "alerts>0")}>
      ${faulty} of ${runs.length} runs have alerts</button>`}
    <${Legend} ...${{ scale, statistic, mode, theme }} />
    <div class=${columns > 1 ? "stage two" : "stage"}>
      ${contents.map((shown) => html`<${Panel} page=${page} shown=${shown} key=${shown.panel.name} />`)}
    </div>
  </div>`;
}

/** The color scale with its title. */
function Legend({ scale, statistic, mode, theme }) {
  const swatch = (colors, text) => {
    const [first, second] = colors;
    const stripes = `repeating-linear-gradient(45deg, ${first} 0 5px, ${second} 5px 7px)`;
    return html`<span class="swatch"><i style=${{ background: second ? stripes : first, color: first }} />${text}</span>`;
  };
  const draw = (canvas) => drawScale(canvas, scale, theme, usualOf(statistic, scale));
  return html`<div class="legend">
    <p class="legend-title" title=${statistic.description}>
      <b>${legendTitle(statistic, mode)}</b><span class="muted">${statistic.description}</span>
    </p>
    <${Plot} draw=${draw} aria-label="color scale" />
    ${scale.log && swatch([ZERO_COLOR], "0")}
    ${swatch(INFINITE_COLORS, "infinite")} ${swatch(NAN_COLORS, "NaN")} ${swatch([theme.missing], "not measured")}
  </div>`;
}

function Panel({ page, shown }) {
  const { panel, field, statistic, curves } = shown;
  const { layers, lastStep } = panel.overview;
  const strip = stripOf(shown);
  const costs = costsOf(shown);
  const isEmpty = !field.steps.length || !shown.rows.length;
  const title = shown.mode === "run" ? `${panel.name}, relative to ${page.state.other}` : panel.name;
  const pick = (found) => {
    const layer = found.layer ?? found.lines.find(({ isNearest }) => isNearest)?.layer;
    if (layer === undefined) page.update({ step: found.step });
    else selectIn(page, panel, layer, found.step);
  };
  /** The crosshair of a curve is also on its layer's row. */
  const onCurve = (found) => {
    const nearest = found?.lines.find(({ isNearest }) => isNearest)?.layer;
    return found && { step: found.step, layer: layers[nearest]?.name ?? null };
  };
  const over = `${statistic.title} over time`;
  return html`<section class="panel" aria-label=${panel.name} data-run=${panel.name} data-layers=${layers.length}
    data-steps=${field.steps.length} data-last-step=${lastStep}>
    <div>
      ${page.panels.length > 1 && html`<h2 class="run-name">${title}</h2>`}
      ${strip && html`<${CurveLegend} curves=${strip.legend} />
        <${Plot} class="strip" aria-label="Loss and learning rate" onPick=${pick}
          draw=${(canvas) => drawStrip(canvas, strip, shown)} />`}
      ${costs && html`<details class="costs-row">
        <summary>${costs.line}</summary>
        <${CurveLegend} curves=${costs.legend} title=${costs.title} />
        <${Plot} class="costs" aria-label="Time and memory" onPick=${pick}
          draw=${(canvas) => drawCosts(canvas, costs, shown)} />
      </details>`}
    </div>
    <div class="notes">
      <${Notice} page=${page} shown=${shown} />
      <${First} page=${page} shown=${shown} />
    </div>
    <div>
      ${layers.length > 0 && html`<div class="map-row">
        <${HeatMap} page=${page} shown=${shown} />
        ${shown.rightOf > 0 && html`<${Profile} shown=${shown} onPick=${pick} />`}
      </div>`}
      ${!isEmpty && curves.length > 0 && html`<h2 class="curves-title">${over}</h2>
        <${LayerCurves} shown=${shown} label=${over} onPick=${pick} at=${onCurve} />
        <${CurveLegend} curves=${curves} />`}
    </div>
  </section>`;
}

/** The heat map. */
function HeatMap({ page, shown }) {
  const { panel } = shown;
  const [node, map] = [useRef(), useRef()];
  const at = crosshair.use();
  if (map.current) map.current.on = { ...page.eventsOf(panel), hover: hoverOf(page, shown) };
  useLayoutEffect(() => {
    map.current = new Heatmap(node.current, { ...page.eventsOf(panel), hover: hoverOf(page, shown) });
    watchPointer(map.current);
  }, []);
  useLayoutEffect(() => {
    map.current.draw({ ...shown, width: shown.width - shown.rightOf });
    hoverAgain(map.current);
  }, [shown]);
  useLayoutEffect(() => {
    const row = at?.layer != null ? rowOfLayer(shown.rows, panel.indexOf(at.layer)) : (at?.row ?? -1);
    if (!at) map.current.pointer = null; // such as after scrolling
    map.current.hover = at && { step: at.step, row };
    map.current.drawOverlay();
  }, [at, shown]);
  return html`<div class="heatmap" ref=${node} tabindex="0" role="application" aria-label="Layers over steps">
    <canvas class="cells" /><canvas class="overlay" />
  </div>`;
}

/** Moves crosshair and tooltip to a cell, or to the name of a group. */
function hoverOf(page, shown) {
  const { panel, field, values, scale, statistic } = shown;
  return (cell, x, y, group) => {
    if (group) {
      const what = page.state.folded.has(group) ? "click to unfold" : "click to fold";
      return point(null, { x, y, title: group, parts: html`<span>${what}</span>` });
    }
    if (!cell) return point(null);
    const layer = panel.overview.layers[cell.layer];
    const row = shown.rows[cell.row];
    const value = valueAt(field, cell.layer, cell.step);
    const relative = scale.diverging ? valueAt({ ...field, values }, cell.layer, cell.step) : -1;
    const relation = relative >= 0 && relative < Infinity ? ` (${scaleText(scale, relative)})` : "";
    const next = field.steps[cell.column + 1];
    const until = next > cell.step + 1 ? `, next measured at ${formatStep(next)}` : "";
    point(
      { step: cell.step, layer: layer.name },
      {
        x,
        y,
        title: row.folded ? `${row.folded} (${row.type}; here ${titleOf(layer)})` : titleOf(layer),
        parts: html`<span>${layer.type} · step ${formatStep(cell.step)}${until}</span>
          <span class=${Number.isFinite(value) ? "" : "nonfinite"}>
            ${statistic.title}: ${formatValue(statistic, value)}${relation}
          </span>`,
      },
    );
  };
}

/** Over the depth, at the crosshair's step; without it at the selected one, in the middle, or at the end. */
function Profile({ shown, onPick }) {
  const { step0, step1 } = shown.view;
  const middle = Math.floor((step0 + step1) / 2);
  const step = crosshair.use()?.step ?? shown.cursor ?? (shown.isZoomed ? middle : shown.panel.overview.lastStep);
  const { layers } = shown.panel.overview;
  const at = (found) => found && { ...found, layer: layers[found.layer].name };
  return html`<${Plot} class="profile" at=${at} aria-label="${shown.statistic.title} over the depth at step ${step}"
    draw=${(canvas) => drawProfile(canvas, shown, shown.rightOf, step)} onPick=${onPick} />`;
}

/** Curves of the selected layer and those with alerts; that of the row under the pointer is thick. */
function LayerCurves({ shown, label, onPick, at }) {
  const name = crosshair.use()?.layer;
  const layer = name == null ? -1 : shown.panel.indexOf(name);
  const hovered = layer < 0 ? null : shown.rows[rowOfLayer(shown.rows, layer)]?.label;
  const isDrawn = shown.curves.some((curve) => curve.label === hovered);
  const drawn = useRef({});
  const key = isDrawn ? hovered : null;
  if (drawn.current.shown !== shown || drawn.current.key !== key) {
    drawn.current = { shown, key, draw: (canvas) => drawLayerCurves(canvas, shown, key) };
  }
  return html`<${Plot} class="curves" aria-label=${label} draw=${drawn.current.draw} at=${at} onPick=${onPick} />`;
}

/** The line with the first NaN or difference; a click goes there. */
function First({ page, shown }) {
  const { panel, statistic, mode, values } = shown;
  const isOfTwo = mode === "run";
  const field = isOfTwo ? shown.field : panel.field(statistic);
  const found = isOfTwo ? firstDifference(field, values) : panel.firstNonfinite(field);
  if (!found) return html`<div class="first-nonfinite" hidden />`;
  const names = found.rows.map((row) => panel.overview.layers[field.firstLayer + row * field.layerFactor]);
  const more = names.length > 1 ? ` and ${names.length - 1} more` : "";
  const at = `step ${formatStep(found.step)}, in `;
  const text =
    isOfTwo || !more
      ? `First ${isOfTwo ? "difference" : "NaN or infinity"}: ${at}${titleOf(names[0])}${more}`
      : `First NaN or infinity: ${at}${names.length} layers${originText(panel.alerts)}`;
  return html`<div class="first-nonfinite">
    <button title=${text} onclick=${() => goTo(page, found.step)}>${text}</button>
  </div>`;
}

/** The layer in which NaN began, by the alert about it: within a step, NaN spreads forwards and backwards. */
function originText(alerts) {
  const faults = alerts.flatMap((alert) => [alert, ...alert.consequences]);
  const named = faults.find(({ kind, module_name: layer }) => kind === "nonfinite" && layer);
  return named ? `; alert: ${named.module_name}` : "";
}

function Notice({ page, shown }) {
  const text = noticeOf(page, shown);
  const { zoom, openedAt } = page;
  const isOpenedHere = openedAt !== null && zoom === openedAt;
  const steps = [shown.view.step0, shown.view.step1 - 1].map((step) => formatStep(Math.max(step, 0))).join(" to ");
  return html`<p class="notice" role="status" hidden=${!text && !isOpenedHere}>
    ${isOpenedHere && html`Opened at the first NaN: steps ${steps} of ${formatStep(shown.panel.overview.lastStep)}.${" "}
      <button class="link" onclick=${() => unzoom(page)}>Show all steps</button>`} ${text}
  </p>`;
}

/** About what is not shown, and layers that do not train; "" without any. */
function noticeOf(page, { panel, field, statistic, rows, mode, values }) {
  const { layers, trainedShare } = panel.overview;
  const { search } = page.state;
  if (mode === "run" && field.steps.length && values.every((value) => value === -1)) {
    return "No layer has this statistic at a common step in both runs: there is no ratio to show.";
  }
  if (!rows.length && search) return `No layer matches “${search}”.`;
  if (!layers.length) return "This run has no layers: only scalars were logged.";
  if (!field.steps.length) return `${statistic.title}: not measured yet.`;
  const notices = [];
  if (trainedShare !== null && trainedShare < 1) {
    notices.push(`${(100 * trainedShare).toFixed(1)} % of the parameters are in layers that train.`);
  }
  const parts = [];
  if (field.layerFactor > 1) parts.push(`${field.layerFactor} layers`);
  if (field.stepFactor > 1) parts.push(`${field.stepFactor} steps`);
  if (parts.length) notices.push(`Reduced: each cell is the largest of ${parts.join(" × ")}.`);
  if (field.sampled) notices.push("Too much to read at once: some steps are omitted.");
  if (isThinned(field) && !field.isAll) notices.push("Zoom in to see all.");
  if (panel.part.answer?.error) notices.push(`The part in view could not be read: ${panel.part.answer.error.message}.`);
  if (!field.values.some((value) => value >= 0 || value !== value)) {
    notices.push(`${statistic.title}: not measured for any layer of this run.`);
  }
  return notices.join(" ");
}
