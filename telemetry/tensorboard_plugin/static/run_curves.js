// One statistic of a layer, or the loss, in many runs: below the table of runs, and in a report.

import { drawChart, Slots, styleOf } from "./chart.js";
import { isLog } from "./curves.js";
import { aligned } from "./field.js";
import { CurveLegend, DropDown, Followed, Plot } from "./parts.js";
import { html, useRef } from "./preact.js";
import { Latest } from "./state.js";

const MOST = 20; // runs with distinguishable curves
const HEIGHT = 190;
const DELAY_MS = 200;
const PADDING = 36;
const SEED = /seed/i;

/** The name of the run under the pointer, in the table of runs or in these curves. */
export const hoveredRun = new Followed();

/** @param {Object} props `runs`: rows of the table of runs; `isOpen`; `onToggle(isOpen)`; `isOfLoss`: of nothing else */
export function RunCurves({ page, runs, isOpen, onToggle, isOfLoss = false }) {
  const { theme, source } = page;
  const { layer, smoothing, seeds, curves: subject } = page.state;
  const [latest, known, slots] = [useRef(null), useRef(new Map()), useRef(new Slots())];
  latest.current ??= new Latest(() => page.draw());
  const hasChoice = !isOfLoss && layer !== null;
  const layerTitle = hasChoice ? `${page.statistic.title} of ${layer || "the model"}` : "";
  const isOfLayer = hasChoice && subject !== "loss";
  const of = isOfLayer ? [layer, page.statistic.name] : [null];
  const names = runs.map(({ name }) => name);
  const read = () => readCurves((run) => curveOf(source, known.current, run, ...of), names);
  const found = isOpen ? latest.current.to([...of, ...names].join("\n"), null, read, DELAY_MS) : null;
  const hasSeeds = runs.some(({ hparams }) => Object.keys(hparams ?? {}).some((name) => SEED.test(name)));
  const own = (found ?? []).map((curve) => ({ ...curve, run: runs[names.indexOf(curve.name)], label: curve.name }));
  const lines = seeds && hasSeeds ? groupsOf(own) : own;
  const indices = slots.current.assign(lines.map(({ label }) => label));
  const curves = lines.map((curve, i) => smoothed({ ...curve, ...styleOf(theme, indices[i]) }, smoothing ?? 0));
  const count = found && found.length < names.length ? `${found.length} of ${names.length}` : names.length;
  const title = `${isOfLayer ? layerTitle : "Loss"} of ${count} run${names.length === 1 ? "" : "s"}`;
  return html`<details class="below-runs run-curves" open=${isOpen} ontoggle=${({ target }) => onToggle(target.open)}>
    <summary>${title}</summary>
    <p class="controls">
      ${hasChoice && html`<${DropDown} label="Curves of" value=${isOfLayer ? "layer" : "loss"}
        options=${[["layer", layerTitle], ["loss", "the loss"]]} onChoose=${(chosen) => page.update({ curves: chosen })} />`}
      <label>Smoothing<input type="range" min="0" max="0.99" step="0.01" value=${smoothing ?? 0}
        oninput=${({ target }) => page.update({ smoothing: Number(target.value) || null })} /></label>
      ${hasSeeds && html`<label><input type="checkbox" checked=${seeds}
        onchange=${({ target }) => page.update({ seeds: target.checked })} />Group by seed (mean, and range as a band)</label>`}
    </p>
    ${found && html`<${Chart} ...${{ curves, theme, title }} />`}
    ${found && (curves.length ? html`<${CurveLegend} curves=${curves} />` : "Not measured in these runs.")}
  </details>`;
}

function Chart({ curves, theme, title }) {
  const hovered = hoveredRun.use();
  const draw = (canvas) => {
    const end = Math.max(1, ...curves.map(({ steps }) => steps[steps.length - 1] + 1));
    const thick = curves.map((curve) => (curve.label === hovered ? { ...curve, width: 3 } : curve));
    return drawChart(canvas, {
      curves: thick,
      theme,
      view: { step0: 0, step1: end },
      width: Math.max(canvas.closest(".below-runs").clientWidth - PADDING, 240),
      height: HEIGHT,
      left: 58,
      log: isLog(curves),
      axis: true,
    });
  };
  const at = (found) => {
    hoveredRun.set(found?.lines.find(({ isNearest }) => isNearest)?.label ?? null);
    return found;
  };
  return html`<${Plot} draw=${draw} at=${at} aria-label=${title} />`;
}

/** The curve of a run: the loss, or one of a layer; null without it, or if it cannot be read. */
function curveOf(source, known, run, layer, statistic) {
  const key = JSON.stringify([run, layer, statistic]);
  const read = async () => {
    if (layer === null) return (await source.scalars(run)).find(({ kind }) => kind === "loss");
    const { layers } = await source.overview(run);
    if (!layers.some(({ name }) => name === layer)) return null;
    return (await source.layer(run, layer)).statistics.get(statistic);
  };
  if (!known.has(key)) known.set(key, read().catch(() => null));
  return known.get(key);
}

/** The curves of the first runs that have one, of all the runs if there are not more. */
async function readCurves(read, names) {
  const found = [];
  for (let at = 0; at < names.length && found.length < MOST; at += MOST) {
    const some = names.slice(at, at + MOST);
    const curves = await Promise.all(some.map(read));
    found.push(...curves.map((curve, i) => ({ ...curve, name: some[i] })).filter(({ steps }) => steps?.length));
  }
  return found.slice(0, MOST);
}

/** Runs that differ in nothing but the seed, each group with its mean and range at every common step. */
function groupsOf(found) {
  const rest = ({ hparams }) => Object.entries(hparams ?? {}).filter(([name]) => !SEED.test(name));
  const all = found.map(({ run }) => Object.fromEntries(rest(run)));
  const isShared = ([name, value]) => all.every((values) => values[name] === value);
  const groups = Map.groupBy(found, ({ run }) => JSON.stringify(rest(run)));
  return [...groups.values()].map((members) => {
    const [{ run }] = members;
    const { steps, at } = aligned(members);
    const values = at.map((of) => of.reduce((sum, value) => sum + value, 0) / of.length);
    const band = [at.map((of) => Math.min(...of)), at.map((of) => Math.max(...of))];
    const differing = rest(run).filter((pair) => !isShared(pair)).map((pair) => pair.join("="));
    const label = `${differing.join(" ") || run.name} (${members.length} run${members.length === 1 ? "" : "s"})`;
    return { steps, values, band: members.length > 1 ? band : null, label };
  });
}

/** The exponential moving average of a curve, corrected for its start; the curve itself is behind it. */
function smoothed(curve, weight) {
  if (!weight) return curve;
  const average = (values) => {
    let [sum, share] = [0, 0];
    return Array.from(values, (value) => {
      if (!Number.isFinite(value)) return value;
      sum = weight * sum + (1 - weight) * value;
      share = weight * share + 1 - weight;
      return sum / share;
    });
  };
  return { ...curve, values: average(curve.values), band: curve.band?.map(average), raw: curve.band ? null : curve.values };
}
