// The row of controls at the top, which in a narrow window a button shows; saving the view as PNG or CSV.

import { foldAt, listRuns, move, unzoom } from "./actions.js";
import { isThinned, rowOf } from "./field.js";
import { formatStep } from "./format.js";
import { contentsOf } from "./panel.js";
import { DropDown } from "./parts.js";
import { html } from "./preact.js";
import { deepest, groupsAtDepth } from "./rows.js";
import { MODES } from "./scale.js";

const ORDER = [["depth", "by depth"], ["role", "by role"]];

/** Controls of the class `rare` are hidden in a narrow window, unless it is `full`. */
export function Toolbar({ page }) {
  const { state, runs } = page;
  const [panel] = page.panels;
  const statistics = panel.overview.statistics.map(({ name, title }) => [name, title]);
  const modes = Object.entries(MODES).filter(([mode]) => mode !== "run" || state.other);
  return html`
    <${RunButton} label="Run" name=${state.run} runs=${runs} onclick=${() => listRuns(page, "run")} />
    ${runs.length > 1 && html`<div class="pair rare">
      <${RunButton} label="Compare with" name=${state.other} runs=${runs} onclick=${() => listRuns(page, "other")} />
      ${state.other && html`<button title="Stop comparing" aria-label="Stop comparing"
        onclick=${() => page.update({ other: "" })}>✕</button>`}
    </div>`}
    <${DropDown} label="Statistic" options=${statistics} value=${state.statistic}
      onChoose=${(statistic) => page.update({ statistic })} />
    <${DropDown} label="Show" class="field rare" options=${modes} value=${page.mode}
      onChoose=${(mode) => page.update({ mode })} />
    ${deepest(panel.groupings.role) > 0 && html`<${DropDown} label="Order" class="field rare" options=${ORDER}
      value=${state.order} onChoose=${(order) => page.update({ order, folded: new Set(), zoom: null })} />`}
    <${Layers} page=${page} grouping=${panel.groupings[state.order]} />
    <label class="field rare">
      <span>Filter layers</span>
      <input type="search" placeholder="name or class" value=${state.search}
        title="Part of a name or class; “pictures” lists the layers that have some"
        oninput=${({ target }) => page.update({ search: target.value, zoom: null })}
        onkeydown=${({ key }) => key === "Enter" && move(page, 0)} />
    </label>
    <button class="reset" disabled=${!state.zoom} title="Show everything (0)" onclick=${() => unzoom(page)}>Reset zoom</button>
    <button class="drawer-open" onclick=${() => page.update({ side: true })}>Alerts ${page.alerts.length}</button>
    <${Saving} page=${page} />
    <${Live} page=${page} />
    <button class="more" aria-expanded=${String(state.full)}
      onclick=${() => page.update({ full: !state.full })}>More</button>
  `;
}

function Saving({ page }) {
  const { run, other, checked } = page.state;
  const runs = [...new Set([run, other, ...checked].filter(Boolean))];
  const url = page.source.reportUrl?.(runs);
  const save = (kind) => html`<button aria-label="Save as ${kind.toUpperCase()}"
    onclick=${() => saveView(page, kind).catch((error) => page.fail(error))}>${kind.toUpperCase()}</button>`;
  return html`<details class="menu rare">
    <summary>Save</summary>
    <div>
      ${["png", "csv"].map(save)}
      ${url && html`<a class="button" href=${url} download="">
        ${runs.length > 1 ? `Report of ${runs.length} runs` : "Report"}</a>`}
    </div>
  </details>`;
}

function Live({ page }) {
  const { failure, source, isLive } = page;
  const lastStep = Math.max(...page.panels.map(({ overview }) => overview.lastStep));
  return html`<div class="field live">
    <span class=${failure ? "failure" : "muted"} title=${failure}>
      as of step ${formatStep(lastStep)}${failure && html`<span role="alert"> (${failure})</span>`}
    </span>
    ${source.isLive && html`<div>
      <button data-key="reload" title="Reload: read new data" aria-label="Reload" onclick=${() => page.refresh()}>⟳</button>
      <button data-key="live" aria-pressed=${String(isLive)} title="Read new data every 5 seconds"
        onclick=${() => page.setLive(!isLive)}>Live</button>
    </div>`}
  </div>`;
}

function RunButton({ label, name, runs, onclick }) {
  const text = name || "none";
  const button = html`<button class="run-button" title=${text} data-key=${label} aria-haspopup="dialog"
    aria-label="${label}: ${text}" onclick=${onclick}><span>${text}</span> ▾</button>`;
  return html`<div class="field">
    <span>${label}</span>
    ${runs.length > 1 ? button : html`<b class="run-name" title=${text}>${text}</b>`}
  </div>`;
}

/** Which layers have a row: those with values, all of them, or groups in place of them. */
function Layers({ page, grouping }) {
  const { folded, all, order } = page.state;
  const levels = Array.from({ length: deepest(grouping) }, (_, i) => i + 1);
  const isFoldedAt = (depth) => !folded.symmetricDifference(new Set(groupsAtDepth(grouping, depth))).size;
  const level = levels.find(isFoldedAt) ?? "some";
  const at = (depth) => (order === "role" ? "one row per role" : `folded at depth ${depth}`);
  const options = [
    ["measured", "with values"],
    ["all", "all"],
    ...levels.map((depth) => [String(depth), at(depth)]),
    ...(folded.size && level === "some" ? [["some", "some folded"]] : []),
  ];
  const value = folded.size ? String(level) : all ? "all" : "measured";
  return html`<${DropDown} label="Layers" class="field rare" options=${options} value=${value}
    onChoose=${(chosen) => foldAt(page, Number(chosen) || 0, { all: chosen === "all" })} />`;
}

// --- saving

const MARGIN = 12;

async function saveView(page, kind) {
  const name = `${page.state.run}-${page.statistic.name}`.replace(/[^\w.-]+/g, "_");
  if (kind === "png") return download(`${name}.png`, await pictureOf(page));
  const [content] = contentsOf(page);
  const thinned = isThinned(content.field) ? "-thinned" : "";
  download(`${name}${thinned}.csv`, new Blob([csvOf(content)], { type: "text/csv" }));
}

/** The runs side by side as they are seen. */
function pictureOf(page) {
  const { theme, root } = page;
  const picture = root.querySelector(".picture");
  const { left, top, width, height } = picture.getBoundingClientRect();
  const canvas = document.createElement("canvas");
  canvas.width = (width + 2 * MARGIN) * devicePixelRatio;
  canvas.height = (height + 2 * MARGIN) * devicePixelRatio;
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  context.fillStyle = theme.background;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.font = theme.font;
  context.textBaseline = "middle";
  const place = (node) => {
    const box = node.getBoundingClientRect();
    return [box.left - left + MARGIN, box.top - top + MARGIN, box.width, box.height];
  };
  const seen = (selector) => [...picture.querySelectorAll(selector)].filter((node) => node.checkVisibility());
  for (const node of seen("canvas")) context.drawImage(node, ...place(node));
  for (const node of seen(".sample, .swatch i")) {
    context.fillStyle = getComputedStyle(node).color;
    context.fillRect(...place(node));
  }
  for (const node of seen("h2, .legend-title b, .swatch, .curve-legend span, .first-nonfinite button")) {
    const [x, y, , rowHeight] = place(node);
    const before = node.firstElementChild; // a sample
    context.fillStyle = getComputedStyle(node).color;
    context.fillText(node.textContent, x + (before ? before.offsetWidth + 5 : 0), y + rowHeight / 2);
  }
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

/** A line per step and layer in view. */
function csvOf({ panel, field, rows, view, statistic }) {
  const lines = [`run,step,module_name,type_name,${statistic.name}`];
  const shown = rows.slice(Math.floor(view.row0), Math.ceil(view.row1)).flatMap(({ layers }) => layers);
  field.steps.forEach((step, column) => {
    if (step < view.step0 || step >= view.step1) return;
    for (const layer of shown) {
      const row = rowOf(field, layer);
      const value = row < 0 ? -1 : field.values[column * field.rows + row];
      if (value < 0) continue;
      const { name, type } = panel.overview.layers[layer];
      lines.push([panel.name, step, name, type, numberText(value)].map(csvText).join(","));
    }
  });
  return `${lines.join("\n")}\n`;
}

/** All digits of a float32, as in Python. */
function numberText(value) {
  if (value !== value) return "nan";
  return value === Infinity ? "inf" : String(Number(value.toPrecision(8)));
}

function csvText(value) {
  const text = String(value).replace(/[\r\n]/g, " ");
  return /[",]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
