// Everything about one layer: its statistics at a step and over time, histograms, pictures, alerts.

import { chooseAlert, close, listOnsets, moveStep, select } from "./actions.js";
import { alertTitle, layersOf } from "./alerts.js";
import { prepare } from "./canvas.js";
import { drawChart, styleOf } from "./chart.js";
import { axisOf } from "./curves.js";
import { drawHistogram, drawUnits, quantilesOf, shareOfZeros, unitsText } from "./distribution.js";
import { columnAt } from "./field.js";
import { capital, formatNumber, formatStep, formatValue } from "./format.js";
import { CurveLegend, DropDown, Letter, Plot } from "./parts.js";
import { html, useLayoutEffect, useRef } from "./preact.js";
import { titleOf } from "./rows.js";
import { makeScale } from "./scale.js";

const MAX_CURVES = 4;
const CONVOLUTION = /^Conv/;
const KEPT_PICTURES = 10; // by TensorBoard's default
const QUANTILES = [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99];

/**
 * The data of a layer.
 * @param {Object} panel the run of its histograms and pictures
 * @param {Object[]} panels all runs that are shown: the curves of those that have the layer
 */
export async function readLayer(source, panel, panels, layer) {
  const parts = await Promise.allSettled([
    source.histograms(panel.name, layer),
    source.images(panel.name, layer),
    source.units?.(panel.name, layer),
    ...panels.map((known) => (known.indexOf(layer) < 0 ? null : source.layer(known.name, layer))),
  ]);
  const [histograms, images, units, ...groups] = parts.map(({ value }) => value ?? null);
  const failed = parts.find(({ status }) => status === "rejected");
  return { histograms, images, units, groups, failure: failed?.reason.message };
}

export function Detail({ page }) {
  const node = useRef();
  const { statistic, state, theme, detailed: panel } = page;
  const layer = panel.overview.layers[panel.indexOf(state.layer)];
  const data = page.layerData();
  const groups = data?.groups ?? [];
  const isKnown = groups.some(Boolean);
  const width = Math.max((node.current?.clientWidth || 347) - 2, 240);
  const shown = { page, panel, layer, statistic, theme, width, data, groups, step: state.step, view: page.view() };
  const hasSteps = panel.steps(statistic).length > 0;
  const own = groups[page.panels.indexOf(panel)];
  return html`<section class="detail" aria-label="Layer" ref=${node} data-layer=${layer.name} data-loaded=${String(Boolean(data))}>
    <${Heading} ...${shown} />
    ${hasSteps && html`<${UntrainedNote} layer=${layer} group=${own} />`}
    ${!data && html`<p class="muted">Loading…</p>`}
    ${data?.failure && html`<p class="failure">${data.failure}</p>`}
    ${data?.histograms?.length > 0 && html`<${Histograms} ...${shown} />`}
    ${data?.images?.map((picture) => html`<${Pictures} ...${shown} picture=${picture} key=${picture.tag} />`)}
    ${data?.units?.count > 0 && html`<${Units} ...${shown} />`}
    ${isKnown && html`<${Curves} ...${shown} /><${Statistics} ...${shown} />`}
    ${data?.images?.length === 0 && CONVOLUTION.test(layer.type) && html`<${NearestPictures} ...${shown} />`}
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
    ${page.panels.length > 1 && html`<p class="run-name"><${Letter} index=${page.panels.indexOf(panel)} /> ${panel.name}</p>`}
    <p class="muted">${[layer.type, shapes.join(", ")].filter(Boolean).join(" · ")}</p>
    ${layer.code && html`<p class="muted code">forward: ${layer.code}</p>`}
    ${alerts.map((alert) => html`<button class="first-alert ${alert.severity} to-alert" onclick=${() => choose(alert)}>
      ${isCause(alert) ? "Caused by: " : ""}${alertTitle(alert)}, step ${formatStep(alert.step)}</button>`)}
    <p class="step-navigation">
      ${button("‹", "Previous measured step (←)", () => moveStep(page, -1))}
      <b>${step === null ? "no step chosen" : `step ${formatStep(step)}`}</b>
      ${button("›", "Next measured step (→)", () => moveStep(page, 1))}
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
  const { statistics } = page.current.overview;
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
        <td><${Spark} ...${{ curves, statistic: known, view, theme, step }} /></td>
      </tr>`;
  };
  const letters = groups.map((_, i) => html`<td class="number"><${Letter} index=${i} /></td>`);
  return html`<table class="statistics">
    ${groups.length > 1 && html`<thead><tr><td />${letters}<td /></tr></thead>`}
    <tbody>${statistics.map(row)}</tbody>
  </table>`;
}

function Curves({ page, groups, statistic, theme, view, step, width, layer, panel }) {
  const over = html`<h3>${statistic.title} over time</h3>`;
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
  const draw = (canvas) =>
    drawChart(canvas, {
      curves, view, theme, width,
      height: 150,
      left: 58,
      ...axisOf(statistic, makeScale(statistic, "value", curves.map(({ values }) => values))),
      cursor: step,
      marks: panel.alerts.filter((alert) => layersOf(alert).includes(layer.name)).map((alert) => alert.step),
      axis: true,
    });
  return html`<div>
    ${over}
    <${Plot} class="curve" draw=${draw} aria-label="${statistic.title} over time" onPick=${pickStep(page)} />
    ${curves.length > 1 && html`<${CurveLegend} curves=${curves} />`}
  </div>`;
}

const pickStep = (page) => ({ step }) => page.update({ step });

function Units({ page, data: { units }, theme, view, step, width }) {
  return html`<div class="units">
    <h3>Largest magnitude of each unit</h3>
    <${Plot} aria-label="Units over time" onPick=${pickStep(page)}
      draw=${(canvas) => drawUnits(canvas, units, { view, theme, width, step })} />
    <p class="muted">${unitsText(units, Math.max(columnAt(units.steps, step ?? Infinity), 0))}</p>
  </div>`;
}

function Histograms({ page, data: { histograms }, theme, view, step, width }) {
  const keyOf = ({ kind, name }) => `${kind} ${name}`;
  const isOfParameter = ({ kind }) => kind === "parameters" || kind === "gradients";
  const options = histograms.map((known) => [keyOf(known), `${known.kind}: ${isOfParameter(known) ? lastPart(known.name) : known.name}`]);
  const chosen = histograms.find((known) => keyOf(known) === page.state.histogram) ?? histograms[0];
  const index = Math.max(columnAt(chosen.steps, step ?? Infinity), 0);
  const at = chosen.steps[index];
  const title = `${capital(chosen.kind)} of ${chosen.name}`;
  const show = (...of) => html`<${LargeHistogram} ...${{ histogram: chosen, theme, of }} />`;
  const enlarge = () => page.enlarge({ title, steps: chosen.steps, index, show });
  return html`<div>
    <h3>Histogram over time<button class="enlarge" onclick=${enlarge}>Enlarge</button></h3>
    <${DropDown} label="Of" options=${options} value=${keyOf(chosen)} onChoose=${(histogram) => page.update({ histogram })} />
    <${Plot} class="histogram" aria-label=${title} onPick=${enlarge}
      draw=${(canvas) => drawHistogram(canvas, chosen, { view, theme, width, height: 180, step })} />
    <p class="muted">
      Lines: median, 5 % and 95 %. Bars: step ${formatStep(at)}, one of ${chosen.steps.length}.${" "}
      Linear up to ±${formatNumber(chosen.unit)}, logarithmic beyond. ${zeroText(chosen, index)}
    </p>
  </div>`;
}

/** A histogram over all its steps, the bars of one, and that one's quantiles. */
function LargeHistogram({ histogram, theme, of: [index, width, height] }) {
  const { steps } = histogram;
  const view = { step0: steps[0], step1: Math.max(steps[steps.length - 1], steps[0] + 1) };
  const options = { view, theme, width, height, step: steps[index] };
  const cells = (tag, texts) => html`<tr>${texts.map((text) => html`<${tag} class="number">${text}<//>`)}</tr>`;
  const values = quantilesOf(histogram, index, QUANTILES);
  return html`
    <${Plot} draw=${(canvas) => drawHistogram(canvas, histogram, options)} aria-label="Histogram over time" />
    <p class="muted">${zeroText(histogram, index)}</p>
    <table class="quantiles"><tbody>
      ${cells("th", ["share below", ...QUANTILES.map((share) => `${formatNumber(100 * share)} %`)])}
      ${cells("td", ["value", ...values.map(formatNumber)])}
    </tbody></table>`;
}

/** The share of a step's values that are exactly zero, drawn as a separate bar; "" without any. */
function zeroText(histogram, index) {
  const share = shareOfZeros(histogram, index);
  return share > 0 ? `Exactly zero: ${formatNumber(100 * share)} %, a separate bar.` : "";
}

/** A way to the layer with pictures that is nearest in forward order. */
function NearestPictures({ page, panel, layer }) {
  const { layers } = panel.overview;
  const distance = (other) => Math.abs(layers.indexOf(other) - layers.indexOf(layer));
  const [nearest] = layers.filter(({ hasPictures }) => hasPictures).sort((a, b) => distance(a) - distance(b));
  if (!nearest) return html`<p class="muted">No layer of this run has pictures.</p>`;
  return html`<p class="muted">Nearest layer with pictures:${" "}
    <button class="link" onclick=${() => select(page, nearest.name, page.state.step)}>${titleOf(nearest)}</button></p>`;
}

/** Pictures of a kind: a strip over steps. */
function Pictures({ page, panel, step, picture }) {
  const { kind, name, tag, steps, maps } = picture;
  const film = useRef();
  const { source } = page;
  const nearest = Math.max(columnAt(steps, step ?? Infinity), 0);
  useLayoutEffect(() => {
    const frame = film.current?.children[nearest];
    if (frame) film.current.scrollLeft = frame.offsetLeft - film.current.offsetLeft - frame.offsetWidth;
  }, [nearest]);
  if (!steps.length) return null;
  const title = kind === "input" ? "Input of the model" : capital(kind);
  const urlOf = (at) => source.imageUrl(panel.name, tag, at);
  const show = (index, width, height) =>
    html`<${LargePicture} ...${{ url: urlOf(steps[index]), alt: `${kind} at step ${steps[index]}`, width, height, maps }} />`;
  const enlarge = (index) => page.enlarge({ title: `${title} of ${name}`, steps, index, show });
  const frame = (at, index) => html`<button aria-label="Enlarge ${kind} of ${name} at step ${at}"
    aria-current=${index === nearest ? "true" : null} onclick=${() => enlarge(index)}>
    <img src=${urlOf(at)} alt="" loading="lazy" />${formatStep(at)}</button>`;
  // TensorBoard keeps a random sample of more: then steps are not evenly spaced.
  const gaps = new Set(steps.slice(1).map((at, i) => at - steps[i]));
  const isSample = source.isLive && steps.length === KEPT_PICTURES && gaps.size > 1;
  return html`<div class="pictures">
    <h3>${title}<button class="enlarge" onclick=${() => enlarge(nearest)}>Enlarge</button></h3>
    <div class="film" ref=${film}>${steps.map(frame)}</div>
    ${isSample && html`<p class="muted">TensorBoard keeps ${KEPT_PICTURES} steps of a picture, more with --samples_per_plugin images=100.</p>`}
  </div>`;
}

/** A picture as large as there is room, its maps numbered from 0 as their channels are. */
function LargePicture({ url, alt, width, height, maps }) {
  const node = useRef();
  useLayoutEffect(() => {
    const image = new Image();
    image.onload = () => {
      const scale = Math.max(Math.min(width / image.width, height / image.height), 0.5);
      const canvas = node.current;
      if (!canvas) return; // closed meanwhile
      [canvas.width, canvas.height] = [image.width * scale, image.height * scale];
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = false;
      context.drawImage(image, 0, 0, canvas.width, canvas.height);
      if (maps) drawNumbers(context, maps, canvas);
    };
    image.src = url;
  }, [url]);
  const numbered = maps ? `, numbered 0 to ${maps.count - 1}` : "";
  return html`<canvas role="img" aria-label=${alt + numbered} ref=${node} />
    ${maps && html`<p class="muted">Channel numbers</p>`}`;
}

function drawNumbers(context, { count, columns }, { width, height }) {
  const size = 12;
  context.font = `${size}px system-ui, sans-serif`;
  context.textBaseline = "top";
  const rows = Math.ceil(count / columns);
  for (let number = 0; number < count; number++) {
    const left = ((number % columns) * (width - 1)) / columns + 1;
    const top = (Math.floor(number / columns) * (height - 1)) / rows + 1;
    context.fillStyle = "rgb(0 0 0 / 65%)";
    context.fillRect(left, top, context.measureText(String(number)).width + 4, size + 2);
    context.fillStyle = "#ffffff";
    context.fillText(String(number), left + 2, top + 1);
  }
}

/** A small curve without axes. */
function Spark({ curves, statistic, view, theme, step }) {
  const node = useRef();
  const size = [curves.length > 1 ? 64 : 96, 20];
  useLayoutEffect(() => drawSpark(node.current, size, curves, statistic, view, theme, step));
  return html`<canvas ref=${node} />`;
}

function drawSpark(canvas, [width, height], curves, { log }, view, theme, step) {
  const context = prepare(canvas, width, height);
  const scaledOf = (value) => {
    if (!Number.isFinite(value) || (log && value <= 0)) return NaN;
    return log ? Math.log10(value) : value;
  };
  const scaled = curves.map((curve) => Array.from(curve?.values ?? [], scaledOf));
  const finite = scaled.flat().filter((value) => value === value);
  const low = finite.reduce((a, b) => Math.min(a, b), Infinity);
  const high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
  const x = (at) => ((at - view.step0) / (view.step1 - view.step0)) * width;
  const y = (value) => height - 2 - ((value - low) / (high - low || 1)) * (height - 4);
  scaled.forEach((values, number) => {
    context.strokeStyle = theme.curves[number];
    context.beginPath();
    values.forEach((value, i) => {
      const isNew = i === 0 || Number.isNaN(values[i - 1]);
      if (value === value) context[isNew ? "moveTo" : "lineTo"](x(curves[number].steps[i]), y(value));
    });
    context.stroke();
  });
  if (step === null) return;
  context.strokeStyle = theme.muted;
  context.strokeRect(Math.round(x(step)) + 0.5, 0, 0.01, height);
}

function lastPart(name) {
  return name.split(".").pop();
}
