// The side panel: a chosen alert, the layers that changed first, hyperparameters, all alerts, and a layer in detail.

import { chooseAlert, close, listOnsets, move, select } from "./actions.js";
import { axisOf, drawChart, styleOf } from "./chart.js";
import { drawHistogram, drawUnits, quantilesOf, unitsText, zeroText } from "./distribution.js";
import { columnAt } from "./field.js";
import { alertAloud, alertTitle, capital, clamp, formatNumber, formatStep, formatValue, layersOf } from "./format.js";
import { Curves, Dialog, DropDown, Plot, useAnswer } from "./parts.js";
import { html, useLayoutEffect, useRef, useState } from "./preact.js";
import { titleOf } from "./rows.js";
import { makeScale } from "./scale.js";

const SEVERITIES = [["", "all"], ["error", "errors"], ["warning", "warnings"], ["note", "notes"]];

export function Side({ page }) {
  const alert = page.chosenAlert;
  const run = page.panels.length > 1 ? page.current.name : null;
  const step = alert?.step ?? page.state.onsets;
  return html`
    <button class="drawer-close" onclick=${() => close(page)}>Close</button>
    <section class="chosen-alert" aria-label="Chosen alert">
      ${alert && html`<div class="alert ${alert.severity}"><${AlertText} alert=${alert} run=${run} /></div>`}
    </section>
    ${step !== null && html`<${Onsets} page=${page} step=${step} />`}
    ${page.current.indexOf(page.state.layer) >= 0 && html`<${Detail} page=${page} />`}
    <${Hparams} page=${page} />
    <${AlertList} page=${page} />
  `;
}

/** The hyperparameters of the runs, the values in which two differ in bold. */
function Hparams({ page }) {
  const all = page.panels.map(({ overview }) => overview.hparams ?? {});
  const names = [...new Set(all.flatMap(Object.keys))];
  if (!names.length) return null;
  const text = (value) => (typeof value === "number" ? formatNumber(value) : String(value ?? "–"));
  const few = Object.keys(all[0]).map((name) => `${name} ${text(all[0][name])}`).join(" · ");
  const row = (name) => {
    const values = all.map((hparams) => text(hparams[name]));
    const style = new Set(values).size > 1 ? "strong" : "";
    return html`<tr><th scope="row">${name}</th>${values.map((value) => html`<td class=${style}>${value}</td>`)}</tr>`;
  };
  return html`<details class="hparams" open=${!page.source.isLive /* a report may be printed */}>
    <summary title=${few}><b>Hyperparameters</b><span class="muted"> ${few}</span></summary>
    <table><tbody>${names.map(row)}</tbody></table>
  </details>`;
}

const MOST = 8;

/** The layers that changed first around a step. */
function Onsets({ page, step }) {
  const { name: run, round } = page.current;
  const answer = useAnswer(`${run}\n${step}`, round, () => page.source.onsets(run, step));
  if (!answer) return null; // a report knows those at alerts
  const onsets = answer.onsets?.filter(({ name }) => page.current.indexOf(name) >= 0) ?? [];
  const item = ({ name, step: at, factor }) => html`<li>
    <button onclick=${() => select(page, name, at)}>
      <${LayerName} name=${name || "the model"} />
      <span class="number">step ${formatStep(at)} · ${factorText(Number(factor) /* JSON has no infinity */)}</span>
    </button>
  </li>`;
  return html`<section class="onsets" aria-label="Which layers changed first">
    <h2>Which layers changed first
      <span class="count">${onsets.length ? `${answer.count} of ${answer.layers} layers` : ""}</span></h2>
    <p class=${answer.error ? "failure" : "muted"}>${explanation(answer, onsets, formatStep(step))}</p>
    <ol>${onsets.slice(0, MOST).map(item)}</ol>
  </section>`;
}

function explanation({ error, onsets: found }, shown, step) {
  if (error) return error.message;
  if (found === null) return `Too few steps before step ${step} to know the usual range.`;
  if (!shown.length) return `No layer's gradient norm was unusual at step ${step}.`;
  return `Gradient norms out of their usual range by step ${step}, the earliest first.`;
}

function factorText(factor) {
  if (factor === Infinity) return "NaN or infinite";
  if (factor === 0) return "fell to 0";
  return factor >= 1 ? `${formatNumber(factor)}x above` : `${formatNumber(1 / factor)}x below`;
}

/** All alerts, newest first, with filters; a click jumps to the cell. */
function AlertList({ page }) {
  const [severity, setSeverity] = useState("");
  const chosen = page.chosenAlert;
  const all = page.panels
    .flatMap(({ alerts, name }) => alerts.map((alert) => ({ alert, run: page.panels.length > 1 ? name : null })))
    .sort((a, b) => b.alert.step - a.alert.step);
  const shown = all.filter(({ alert }) => !severity || alert.severity === severity);
  const count = shown.length === all.length ? all.length : `${shown.length} of ${all.length}`;
  const item = ({ alert, run }) => html`<li>
    <button class="alert ${alert.severity}" aria-pressed=${String(alert === chosen)} onclick=${() => chooseAlert(page, alert)}>
      <${AlertText} alert=${alert} run=${run} isShort=${alert === chosen} />
    </button>
  </li>`;
  return html`<section class="alerts" aria-label="Alerts">
    <h2>Alerts<span class="count">${all.length ? count : "none"}</span></h2>
    <p class="unseen" role="status">${all.length > 0 && `Latest alert: ${alertAloud(all[0].alert)}`}</p>
    ${all.length > 0 && html`<${DropDown} label="Severity" options=${SEVERITIES} value=${severity} onChoose=${setSeverity} />`}
    <ul>${shown.map(item)}</ul>
  </section>`;
}

/** An alert in a few lines, with the run it is of; without its message where that is written elsewhere. */
function AlertText({ alert, run, isShort = false }) {
  const { severity, step, module_name: culprit, observed_in: observed } = alert;
  return html`
    <span class="alert-head">
      <b>${alertTitle(alert)}<span class="severity">${severity}</span></b>
      <span>step ${formatStep(step)}</span>
    </span>
    ${run && html`<span class="muted">${run}</span>`}
    ${culprit && html`<${LayerName} name=${culprit} />`}
    ${observed && html`<${LayerName} name="observed in ${observed}" />`}
    ${!isShort && html`<span class="alert-message">${alert.message}</span>`}
  `;
}

/** The name of a layer, which breaks behind its dots. */
function LayerName({ name }) {
  return html`<span class="alert-layer">${name.split(/(?<=\.)/).map((part) => [part, html`<wbr />`])}</span>`;
}

// --- a layer: its statistics at a step and over time, histograms, units and pictures

const DELAY_MS = 120;
const MAX_CURVES = 4;

/** The data of a layer in a run; its curves in all runs that are shown and have it. */
async function readLayer(source, panel, panels, layer) {
  const [histograms, images, units, ...groups] = await Promise.all([
    source.histograms(panel.name, layer),
    source.images(panel.name, layer),
    source.units(panel.name, layer),
    ...panels.map((known) => (known.indexOf(layer) < 0 ? null : source.layer(known.name, layer))),
  ]);
  return { histograms, images, units, groups };
}

function Detail({ page }) {
  const { statistic, state, theme, current: panel, panels, source } = page;
  const layer = panel.overview.layers[panel.indexOf(state.layer)];
  const key = [panel.name, ...panels.map(({ name }) => name), layer.name].join("\n");
  const data = useAnswer(key, panel.round, () => readLayer(source, panel, panels, layer.name), DELAY_MS);
  const groups = data?.groups ?? [];
  const shown = { page, panel, layer, statistic, theme, data, groups, step: state.step, view: page.view() };
  return html`<section class="detail" aria-label="Layer" data-layer=${layer.name} data-loaded=${String(Boolean(data))}>
    <${Heading} ...${shown} />
    ${panel.steps(statistic).length > 0 && html`<${UntrainedNote} layer=${layer} group=${groups[panels.indexOf(panel)]} />`}
    ${!data && html`<p class="muted">Loading…</p>`}
    ${data?.error && html`<p class="failure">${data.error.message}</p>`}
    ${data?.histograms?.length > 0 && html`<${Histograms} ...${shown} />`}
    ${data?.images?.map((picture) => html`<${Pictures} ...${shown} ...${picture} key=${picture.tag} />`)}
    ${data?.units?.count > 0 && html`<${Units} ...${shown} />`}
    ${groups.some(Boolean) && html`<${Course} ...${shown} /><${Statistics} ...${shown} />`}
  </section>`;
}

function Heading({ page, panel, layer, step }) {
  const shapes = layer.parameters.map(({ name, shape }) => `${lastPart(name)} ${shape.join("×") || "scalar"}`);
  const alerts = panel.alerts.filter((alert) => alert !== page.chosenAlert && layersOf(alert).includes(layer.name));
  const isCause = ({ consequences, module_name: culprit }) =>
    culprit !== layer.name && consequences.some(({ module_name: name }) => name === layer.name);
  const choose = (alert) => {
    chooseAlert(page, alert);
    page.focusPicture(); // the button is gone then
  };
  const button = (text, title, onclick) => html`<button title=${title} aria-label=${title} onclick=${onclick}>${text}</button>`;
  return html`<header>
    <h2>${titleOf(layer)}${button("✕", "Close (Esc)", () => close(page))}</h2>
    ${page.panels.length > 1 && html`<p class="run-name">${letter(page.panels.indexOf(panel))} ${panel.name}</p>`}
    <p class="muted">${[layer.type, shapes.join(", ")].filter(Boolean).join(" · ")}</p>
    ${layer.code && html`<p class="muted code">forward: ${layer.code}</p>`}
    ${alerts.map((alert) => html`<button class="first-alert ${alert.severity} to-alert" onclick=${() => choose(alert)}>
      ${isCause(alert) ? "Caused by: " : ""}${alertTitle(alert)}, step ${formatStep(alert.step)}</button>`)}
    <p class="step-navigation">
      ${button("‹", "Previous measured step (←)", () => move(page, -1))}
      <b>${step === null ? "no step chosen" : `step ${formatStep(step)}`}</b>
      ${button("›", "Next measured step (→)", () => move(page, 1))}
      ${step !== null && html`<button class="wide" onclick=${() => listOnsets(page)}>Which layers changed first?</button>`}
    </p>
  </header>`;
}

const STATES = {
  frozen: ["Frozen", "requires_grad is False."],
  "not in an optimizer": ["Not in an optimizer", "no optimizer that stepped has these parameters."],
  "no gradient": ["No gradient", "backward() did not reach it at the last full step."],
  "learning rate 0": ["Learning rate 0", "that of its parameter group at the last full step."],
};

/** Why a layer does not train, or which of its parameters have had no gradient at any step. */
function UntrainedNote({ layer: { parameters, state }, group }) {
  const note = (head, text) => html`<p class="frozen"><b>${head}: </b>${text}</p>`;
  if (STATES[state]) return note(...STATES[state]);
  if (!group?.parameters) return null;
  const names = (isIn) => parameters.filter(({ name }) => group.parameters.has(name) === isIn).map(({ name }) => lastPart(name));
  const [without, others] = [names(false), names(true)];
  if (!without.length) return null;
  const of = others.length ? `. Gradients and update ratio are those of ${others.join(", ")}.` : "";
  return note("No gradient at any step", without.join(", ") + of);
}

/** Each statistic with its value in each run and a small curve; those of other steps come last. */
function Statistics({ page, groups, statistic, step, theme, view }) {
  let before = formatStep(step ?? 0);
  const row = (known) => {
    const curves = groups.map((group) => group?.statistics.get(known.name));
    if (!curves.some(Boolean)) return null;
    const columns = curves.map((curve) => (curve ? columnAt(curve.steps, step ?? Infinity) : -1));
    const values = columns.map((column, i) => (column < 0 ? -1 : curves[i].values[column]));
    // Most statistics are measured at some steps only: these are values of the last such step.
    const steps = columns.flatMap((column, i) => (column < 0 ? [] : [formatStep(curves[i].steps[column])]));
    const at = (step !== null && [...new Set(steps)].join(" and ")) || before;
    const isOther = at !== before;
    before = at;
    return html`
      ${isOther && html`<tr><td class="of-step muted" colspan=${groups.length + 2}>measured at step ${at}</td></tr>`}
      <tr class=${known.name === statistic.name ? "chosen" : ""}>
        <th scope="row" title=${known.description}>
          <button onclick=${() => page.update({ statistic: known.name })}>${known.title}</button>
        </th>
        ${values.map((value) => html`<td class=${Number.isFinite(value) ? "number" : "number nonfinite"}>
          ${formatValue(known, value)}</td>`)}
        <td><${Spark} ...${{ curves, title: known.title, log: known.log, view, theme, step }} /></td>
      </tr>`;
  };
  const letters = groups.map((_, i) => html`<td class="number">${letter(i)}</td>`);
  return html`<table class="statistics">
    ${groups.length > 1 && html`<thead><tr><td />${letters}<td /></tr></thead>`}
    <tbody>${page.current.overview.statistics.map(row)}</tbody>
  </table>`;
}

function Spark({ curves, theme, step: cursor, title, ...options }) {
  const size = { width: curves.length > 1 ? 64 : 96, height: 20, left: 0, right: 0, isBare: true };
  const styled = curves.map((curve, i) => curve && { ...curve, color: theme.curves[i], width: 1, label: "AB"[i] }).filter(Boolean);
  const draw = (canvas) => drawChart(canvas, { ...options, ...size, theme, cursor, curves: styled });
  return html`<${Plot} draw=${draw} aria-label="${title} over time" />`;
}

function Course({ page, groups, statistic, theme, view, step, layer, panel }) {
  const named = groups.map((group, i) => [page.panels[i].name, group?.statistics.get(statistic.name)]);
  if (!named.some(([, curve]) => curve)) {
    return html`<p class="muted">${statistic.title}: not measured for this layer.</p>`;
  }
  if (groups.length === 1) {
    named[0][0] = statistic.title;
    const parameters = [...(groups[0].parameters ?? [])].slice(0, MAX_CURVES);
    if (statistic.name === "grad_norm" && parameters.length > 1)
      named.push(...parameters.map(([name, curve]) => [lastPart(name), curve]));
  }
  const curves = named
    .map(([label, curve], i) => ({ ...curve, ...styleOf(theme, i), label }))
    .filter(({ steps }) => steps);
  const title = `${statistic.title} over time`;
  const axis = axisOf(statistic, makeScale(statistic, "value", curves.map(({ values }) => values)));
  const marks = panel.alerts.filter((alert) => layersOf(alert).includes(layer.name)).map((alert) => alert.step);
  const options = { curves, view, theme, height: 150, ...axis, cursor: step, marks, resumed: panel.overview.resumed, hasSteps: true };
  return html`<div>
    <h3>${title}</h3>
    <${Curves} title=${title} onPick=${pickStep(page)} hasLegend=${curves.length > 1} ...${options} />
  </div>`;
}

const pickStep = (page) => ({ step }) => page.update({ step });

function Units({ page, data: { units }, theme, view, step }) {
  return html`<div class="units">
    <h3>Largest magnitude of each unit</h3>
    <${Plot} aria-label="Units over time" onPick=${pickStep(page)}
      draw=${(canvas, width) => drawUnits(canvas, units, { view, theme, width, step })} />
    <p class="muted">${unitsText(units, Math.max(columnAt(units.steps, step ?? Infinity), 0))}</p>
  </div>`;
}

function Histograms({ page, data: { histograms }, theme, view, step }) {
  const keyOf = ({ kind, name }) => `${kind} ${name}`;
  const isOfParameter = ({ kind }) => kind === "parameters" || kind === "gradients";
  const options = histograms.map((known) => [keyOf(known), `${known.kind}: ${isOfParameter(known) ? lastPart(known.name) : known.name}`]);
  const chosen = histograms.find((known) => keyOf(known) === page.state.histogram) ?? histograms[0];
  const { steps } = chosen;
  const index = Math.max(columnAt(steps, step ?? Infinity), 0);
  const title = `${capital(chosen.kind)} of ${chosen.name}`;
  return html`<div>
    <h3>Histogram over time</h3>
    <${DropDown} label="Of" options=${options} value=${keyOf(chosen)} onChoose=${(histogram) => page.update({ histogram })} />
    <${Plot} class="histogram" aria-label=${title} onPick=${pickStep(page)}
      draw=${(canvas, width) => drawHistogram(canvas, chosen, { view, theme, width, height: 180, step })} />
    <p class="muted">
      Bars: step ${formatStep(steps[index])}, one of ${steps.length}. 5 %, median and 95 % are at${" "}
      ${quantilesOf(chosen, index).map(formatNumber).join(", ")}. Linear up to ±${formatNumber(chosen.unit)}, logarithmic beyond. ${zeroText(chosen, index)}
    </p>
  </div>`;
}

/** Pictures of a kind: a strip over steps, and one of them enlarged. */
function Pictures({ page: { source }, panel, step, kind, name, tag, steps, maps }) {
  const film = useRef();
  const [large, setLarge] = useState(null);
  const nearest = Math.max(columnAt(steps, step ?? Infinity), 0);
  useLayoutEffect(() => {
    const frame = film.current?.children[nearest];
    if (frame) film.current.scrollLeft = frame.offsetLeft - film.current.offsetLeft - frame.offsetWidth;
  }, [nearest]);
  if (!steps.length) return null;
  const title = kind === "input" ? "Input of the model" : capital(kind);
  const urlOf = (at) => source.imageUrl(panel.name, tag, at);
  const frame = (at, index) => html`<button aria-label="Enlarge ${kind} of ${name} at step ${at}"
    aria-current=${index === nearest ? "true" : null} onclick=${() => setLarge(index)}>
    <img src=${urlOf(at)} alt="" loading="lazy" />${formatStep(at)}</button>`;
  return html`<div class="pictures">
    <h3>${title}<button class="enlarge" onclick=${() => setLarge(nearest)}>Enlarge</button></h3>
    <div class="film" ref=${film}>${steps.map(frame)}</div>
    ${large !== null && html`<${LargePicture} title="${title} of ${name}" ...${{ kind, steps, maps, urlOf }} index=${large}
      onClose=${() => setLarge(null)} />`}
  </div>`;
}

/** A picture as large as there is room, step by step, its maps numbered from 0 as their channels are. */
function LargePicture({ title, kind, steps, maps, urlOf, index: first, onClose }) {
  const [index, setIndex] = useState(first);
  const move = (count) => setIndex((at) => clamp(at + count, 0, steps.length - 1));
  const onkeydown = ({ key }) => move({ ArrowLeft: -1, ArrowRight: 1 }[key] ?? 0);
  const keepRatio = ({ target }) =>
    target.parentElement.style.setProperty("--ratio", target.naturalWidth / target.naturalHeight);
  const numbers = Array.from({ length: maps?.count ?? 0 }, (_, number) => html`<span><i>${number}</i></span>`);
  const alt = `${kind} at step ${steps[index]}${maps ? `, numbered 0 to ${maps.count - 1}` : ""}`;
  return html`<${Dialog} class="large" aria-labelledby="large-title" onkeydown=${onkeydown} onClose=${onClose}>
    <header>
      <h2 id="large-title">${title}</h2>
      <button aria-label="Earlier" onclick=${() => move(-1)}>‹</button>
      <b role="status">step ${formatStep(steps[index])}</b>
      <button aria-label="Later" onclick=${() => move(1)}>›</button>
      <button class="last" onclick=${onClose}>Close</button>
    </header>
    <div class="large-content">
      <div class="large-picture" style=${{ "--columns": maps?.columns ?? 1 }}>
        <img src=${urlOf(steps[index])} alt=${alt} onload=${keepRatio} />
        <div class="map-numbers" aria-hidden="true">${numbers}</div>
      </div>
    </div>
  <//>`;
}

const letter = (index) => html`<b class="letter letter${index}">${"AB"[index]}</b>`;

function lastPart(name) {
  return name.split(".").pop();
}
