// One statistic of a layer, or the loss, in many runs: below the table of runs, and in a report.

import { isLog, styleOf } from "./chart.js";
import { aligned } from "./field.js";
import { Curves, DropDown, useAnswer } from "./parts.js";
import { html, useRef, useState } from "./preact.js";

const MOST = 20; // distinguishable curves
const AT_ONCE = 20; // runs that are read
const HEIGHT = 190;
const DELAY_MS = 200;
const SEED = /seed/i;

/** @param {Object} props `runs`: rows of the table of runs; `isOpen`: at first; `isOfLoss`: of nothing else */
export function RunCurves({ page, runs, isOpen, isOfLoss = false }) {
  const { theme, source } = page;
  const { layer, smoothing, seeds, curves: subject } = page.state;
  const [toggled, setToggled] = useState(null);
  const slots = useRef(new Map()); // of colors
  const hasChoice = !isOfLoss && layer !== null;
  const layerTitle = hasChoice ? `${page.statistic.title} of ${layer || "the model"}` : "";
  const isOfLayer = hasChoice && subject !== "loss";
  const of = isOfLayer ? [layer, page.statistic.name] : [null];
  const hasSeeds = runs.some(({ hparams }) => Object.keys(hparams).some((name) => SEED.test(name)));
  const isGrouped = seeds && hasSeeds;
  const most = isGrouped ? Infinity : MOST; // a group is one curve of all its runs
  const read = () => readCurves((run) => curveOf(source, run, ...of).catch(() => null), runs, most);
  const isShown = toggled ?? isOpen;
  const key = isShown ? [...of, most, ...runs.map(({ name }) => name)].join("\n") : "";
  const found = useAnswer(key, null, async () => (isShown ? read() : null), DELAY_MS);
  const lines = (isGrouped ? groupsOf(found ?? []) : (found ?? [])).slice(0, MOST);
  if (found) slots.current = slotsOf(lines.map(({ label }) => label), slots.current);
  const styled = lines.map((curve) => ({ ...curve, ...styleOf(theme, slots.current.get(curve.label)) }));
  const curves = styled.map((curve) => smoothed(curve, smoothing ?? 0));
  const drawn = found ? lines.reduce((sum, { count }) => sum + count, 0) : runs.length;
  const count = drawn < runs.length ? `${drawn} of ${runs.length}` : runs.length;
  const view = { step0: 0, step1: Math.max(1, ...curves.map(({ steps }) => steps.at(-1) + 1)) };
  const options = { curves, theme, view, height: HEIGHT, log: isLog(curves), hasSteps: true };
  const title = `${isOfLayer ? layerTitle : "Loss"} of ${count} run${runs.length === 1 ? "" : "s"}`;
  return html`<details class="below-runs run-curves" open=${isShown} ontoggle=${({ target }) => setToggled(target.open)}>
    <summary>${title}</summary>
    <p class="controls">
      ${hasChoice && html`<${DropDown} label="Curves of" value=${isOfLayer ? "layer" : "loss"}
        options=${[["layer", layerTitle], ["loss", "the loss"]]} onChoose=${(chosen) => page.update({ curves: chosen })} />`}
      <label>Smoothing<input type="range" min="0" max="0.99" step="0.01" value=${smoothing ?? 0}
        oninput=${({ target }) => page.update({ smoothing: Number(target.value) || null })} /></label>
      ${hasSeeds && html`<label><input type="checkbox" checked=${seeds}
        onchange=${({ target }) => page.update({ seeds: target.checked })} />Group by seed (mean, and range as a band)</label>`}
    </p>
    ${found && html`<${Curves} title=${title} labelAt=${({ run }) => run} ...${options} />`}
    ${found && !curves.length && "Not measured in these runs."}
  </details>`;
}

/** A number for each name: the one that it has, or the lowest free one. */
function slotsOf(names, before) {
  const taken = new Set(names.map((name) => before.get(name)));
  const free = [...names.keys()].filter((slot) => !taken.has(slot));
  return new Map(names.map((name) => [name, before.get(name) ?? free.shift()]));
}

/** The curve of a run: the loss, or one of a layer; null or undefined without it. */
async function curveOf(source, run, layer, statistic) {
  if (layer === null) return (await source.scalars(run)).find(({ kind }) => kind === "loss");
  const { layers } = await source.overview(run);
  if (!layers.some(({ name }) => name === layer)) return null;
  return (await source.layer(run, layer)).statistics.get(statistic);
}

/** The curves of the first runs that have one, at most so many; some runs at a time. */
async function readCurves(read, runs, most) {
  const found = [];
  for (let at = 0; at < runs.length && found.length < most; at += AT_ONCE) {
    const some = runs.slice(at, at + AT_ONCE);
    const curves = await Promise.all(some.map(({ name }) => read(name)));
    const named = curves.map((curve, i) => ({ ...curve, run: some[i], label: some[i].name, count: 1 }));
    found.push(...named.filter(({ steps }) => steps?.length));
  }
  return found.slice(0, most);
}

/** Runs that differ in nothing but the seed, each group with its mean and range at every common step. */
function groupsOf(found) {
  const rest = ({ hparams }) => Object.entries(hparams).filter(([name]) => !SEED.test(name));
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
    return { steps, values, band: members.length > 1 ? band : null, label, count: members.length };
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
