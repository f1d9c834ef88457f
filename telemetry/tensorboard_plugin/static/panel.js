// The runs side by side: loss and learning rate, the picture with its profile, curves of layers.

import { goTo, listRuns, selectIn } from "./actions.js";
import { chartOf, costsOf, curvesOfLayers, drawProfile, profileWidth, rangesOf, stripOf } from "./curves.js";
import { firstDifference, isThinned, valuesOfRows } from "./field.js";
import { clamp, formatStep } from "./format.js";
import { HeatMap, RIGHT } from "./heatmap.js";
import { CurveLegend, Curves, Plot, usePointed } from "./parts.js";
import { html } from "./preact.js";
import { rowOfLayer, titleOf } from "./rows.js";
import { INFINITE_COLORS, MODES, NAN_COLORS, ZERO_COLOR, drawScale, makeScale, usualOf } from "./scale.js";
import { memo } from "./state.js";
import { clampRows } from "./view.js";

const MIN_HEIGHT = 130; // of the picture
const ROW_HEIGHTS = [22, 38]; // where there is room: with curves below, and at most
const CURVES_HEIGHT = 190;
const AXES_HEIGHT = 42;
const AROUND_PICTURE = 300; // height of everything else that is seen at once
const NARROWEST = 400; // of two pictures next to each other
const GAP = 16;

const scaleOf = memo((values, other, log, mode) => makeScale({ log }, mode, other ? [values, other] : [values]));
const rowValuesOf = memo(valuesOfRows);
const rangesOfRows = memo(rangesOf);

/**
 * What is drawn of each run. All have one scale, which a zoom does not change. A ratio of two runs is
 * one picture, of the first run.
 */
export function contentsOf(page) {
  const { panels, statistic, mode, state, theme } = page;
  const view = page.view();
  const others = panels.map((_, i) => panels[1 - i]);
  const drawn = mode === "run" ? panels.slice(0, 1) : panels;
  const whole = drawn.map((panel, i) => panel.values(panel.field(statistic), statistic, mode, others[i]));
  const scale = scaleOf(whole[0], whole[1], statistic.log, mode);
  const contents = drawn.map((panel, i) => {
    const rows = page.rows(panel);
    const field = panel.fieldIn(view, statistic, state.zoom !== null, rows);
    const values = panel.values(field, statistic, mode, others[i]);
    const layer = panel.indexOf(state.layer);
    const rowValues = rowValuesOf(values, field, rows, scale);
    const content = {
      panel, statistic, theme, mode, scale, rows, field, values, rowValues,
      view: clampRows(view, rows.length),
      isZoomed: state.zoom !== null,
      grouping: panel.groupings[state.order],
      selection: layer < 0 ? null : { layer, step: state.step ?? panel.overview.lastStep },
      cursor: state.step,
      losses: panels.flatMap(({ scalars }) => scalars.filter(({ kind }) => kind === "loss")),
      alerts: panel.alerts,
      resumed: panel.overview.resumed,
      ranges: rangesOfRows(rowValues, field.steps.length, rows.length),
    };
    return { ...content, curves: curvesOfLayers(content) };
  });
  const common = { ...sizeOf(page, contents), fit: contents.flatMap(({ curves }) => curves) };
  return contents.map((content) => ({ ...content, ...common }));
}

function sizeOf(page, contents) {
  const whole = page.root.querySelector(".message-area").clientWidth;
  const hasRoom = whole >= 2 * NARROWEST + GAP && !matchMedia("print").matches;
  const columns = contents.length > 1 && hasRoom ? 2 : 1;
  const width = Math.floor((whole - GAP * (columns - 1)) / columns);
  const rowCount = Math.max(...contents.map(({ rows }) => rows.length));
  const room = Math.max(window.innerHeight - AROUND_PICTURE, 220);
  const below = contents.some(({ curves }) => curves.length) ? CURVES_HEIGHT : 0;
  const [small, large] = ROW_HEIGHTS.map((row) => Math.min(rowCount * row + AXES_HEIGHT, room));
  const height = Math.max(Math.min(large, Math.max(small, room - below)), MIN_HEIGHT);
  const gutter = Math.round(clamp(width * 0.24, Math.min(150, width * 0.36), 250));
  const rightOf = profileWidth(width);
  return { columns, width, height, gutter, right: rightOf + RIGHT, rightOf, spare: room - height };
}

export function Picture({ page }) {
  const contents = contentsOf(page);
  const { runs } = page;
  const faulty = runs.filter(({ alertCount }) => alertCount).length;
  return html`<div class="picture">
    ${runs.length > 1 && faulty > 0 && html`<button class="sweep" onclick=${() => listRuns(page, "run", "alerts>0")}>
      ${faulty} of ${runs.length} runs have alerts</button>`}
    <${Legend} ...${contents[0]} />
    <div class=${contents[0].columns > 1 ? "stage two" : "stage"}>
      ${contents.map((shown) => html`<${Panel} page=${page} shown=${shown} key=${shown.panel.name} />`)}
    </div>
  </div>`;
}

/** The color scale with its title. */
function Legend({ scale, statistic, mode, theme }) {
  const swatch = ([first, second], text) => {
    const stripes = `repeating-linear-gradient(45deg, ${first} 0 5px, ${second} 5px 7px)`;
    return html`<span class="swatch"><i style=${{ background: second ? stripes : first, color: first }} />${text}</span>`;
  };
  const draw = (canvas) => drawScale(canvas, scale, theme, usualOf(statistic, scale));
  return html`<div class="legend">
    <p class="legend-title" title=${statistic.description}>
      <b>${statistic.title}${mode === "value" ? "" : `, ${MODES[mode]}`}</b><span class="muted">${statistic.description}</span>
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
  const notice = noticeOf(page, shown);
  const isEmpty = !field.steps.length || !shown.rows.length;
  const title = shown.mode === "run" ? `${panel.name}, relative to ${page.state.other}` : panel.name;
  const onPick = ({ layer, step }) => (layer === undefined ? page.update({ step }) : selectIn(page, panel, layer, step));
  const labelAt = ({ layer }) => shown.rows[rowOfLayer(shown.rows, panel.indexOf(layer))]?.label;
  const over = `${statistic.title} over time`;
  return html`<section class="panel" aria-label=${panel.name} data-run=${panel.name} data-layers=${layers.length}
    data-steps=${field.steps.length} data-last-step=${lastStep}>
    <div>
      ${page.panels.length > 1 && html`<h2 class="run-name">${title}</h2>`}
      ${strip && html`<${CurveLegend} curves=${strip.legend} />
        <${Plot} class="strip" aria-label="Loss and learning rate" draw=${strip.draw} onPick=${onPick} />`}
      ${costs && html`<p class="costs">${costs}</p>`}
    </div>
    <div class="notes">
      <p class="notice" role="status" hidden=${!notice}>${notice}</p>
      <${First} page=${page} shown=${shown} />
    </div>
    <div>
      ${layers.length > 0 && html`<div class="map-row">
        <${HeatMap} page=${page} shown=${shown} />
        ${shown.rightOf > 0 && html`<${Profile} shown=${shown} onPick=${onPick} />`}
      </div>`}
      ${!isEmpty && curves.length > 0 && html`<h2 class="curves-title">${over}</h2>
        <${Curves} class="curves" title=${over} labelAt=${labelAt} onPick=${onPick} ...${chartOf(shown)} />`}
    </div>
  </section>`;
}

/** Over the depth, at the crosshair's step; without it at the selected one, in the middle, or at the end. */
function Profile({ shown, onPick }) {
  const { step0, step1 } = shown.view;
  const middle = Math.floor((step0 + step1) / 2);
  const step = usePointed((at) => at?.step) ?? shown.cursor ?? (shown.isZoomed ? middle : shown.panel.overview.lastStep);
  return html`<${Plot} class="profile" aria-label="${shown.statistic.title} over the depth at step ${step}"
    draw=${(canvas) => drawProfile(canvas, shown, step)} onPick=${onPick} />`;
}

/** The line with the first NaN or difference; a click goes there. */
function First({ page, shown: { panel, statistic, mode, field: drawn, values } }) {
  const isOfTwo = mode === "run";
  const field = isOfTwo ? drawn : panel.field(statistic);
  const found = isOfTwo ? firstDifference(field, values) : panel.firstNonfinite(statistic);
  if (!found) return html`<div class="first-nonfinite" hidden />`;
  const names = found.rows.map((row) => panel.overview.layers[field.firstLayer + row * field.layerFactor]);
  const more = names.length > 1 ? ` and ${names.length - 1} more` : "";
  const where = isOfTwo || !more ? titleOf(names[0]) + more : `${names.length} layers${originText(panel.alerts)}`;
  const text = `First ${isOfTwo ? "difference" : "NaN or infinity"}: step ${formatStep(found.step)}, in ${where}`;
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

/** About what is not shown, and layers that do not train; "" without any. */
function noticeOf(page, { panel, field, statistic, rows, mode, values }) {
  const { layers, trainedShare, resumed, estimated } = panel.overview;
  const { search } = page.state;
  if (mode === "run" && field.steps.length && values.every((value) => value === -1)) {
    return "No layer has this statistic at a common step in both runs: there is no ratio to show.";
  }
  if (!rows.length && search) return `No layer matches “${search}”.`;
  if (!layers.length) return "This run has no layers: only scalars were logged.";
  if (!field.steps.length) return `${statistic.title}: not measured yet.`;
  const behind = [[field.layerFactor, "layers"], [field.stepFactor, "steps"]].filter(([factor]) => factor > 1);
  const { error } = panel.part;
  const isMeasured = field.values.some((value) => value >= 0 || value !== value);
  const isPartial = trainedShare !== null && trainedShare < 1;
  return [
    resumed.length && `Resumed at step ${resumed.map(formatStep).join(", ")} (dotted).`,
    estimated && "Counts of zeros and of values that are not finite, and kurtosis, are those of samples.",
    isPartial && `${(100 * trainedShare).toFixed(1)} % of the parameters are in layers that train.`,
    behind.length && `Reduced: each cell is the largest of ${behind.map((pair) => pair.join(" ")).join(" × ")}.`,
    isThinned(field) && page.source.isLive && "Zoom in to see all.",
    error && `The part in view could not be read: ${error.message}.`,
    !isMeasured && `${statistic.title}: not measured for any layer of this run.`,
  ]
    .filter(Boolean)
    .join(" ");
}
