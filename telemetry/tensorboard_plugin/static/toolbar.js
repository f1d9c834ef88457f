// The row of controls at the top. In a narrow window, a button shows most of them.

import { dropDown, element, fill } from "./dom.js";
import { saveView } from "./export.js";
import { copyLink } from "./host.js";
import { toLink } from "./permalink.js";
import { deepest, groupsAtDepth } from "./rows.js";

/**
 * @param {HTMLElement} node
 * @param {Object} content `state`, `runs`, `overview`, `grouping`, `hasRoles`, `isZoomed`, `live`
 *   (an element), `alertCount`
 * @param {import("./app.js").App} app
 */
export function drawToolbar(node, content, app) {
  const { state, runs, overview, grouping, isZoomed } = content;
  // Rebuilding would close an open list, and take the place in a text that is being typed.
  const known = JSON.stringify([toLink(state), runs.length, overview.version, content.alertCount]);
  if (node.known === known) return;
  if (node.contains(document.activeElement) && document.activeElement.type === "search") return;
  node.known = known;
  const change = (changes) => app.change(changes);
  const statistics = overview.statistics.map(({ name, title }) => [name, title]);
  const setOrder = (order) =>
    change({ order, folded: new Set(), zoom: keepSteps(state.zoom, app.whole()) });
  const button = (text, properties) =>
    element("button", { dataset: { key: text }, ...properties }, text);
  fill(
    node,
    runButton("Run", state.run, runs, () => app.actions.chooseRun("run")),
    runs.length > 1
      ? rare(runButton("Compare with", state.other, runs, () => app.actions.chooseRun("other")))
      : null,
    state.other
      ? rare(button("Stop comparing", { onclick: () => change({ other: "", zoom: null }) }))
      : null,
    dropDown("Statistic", statistics, state.statistic, (statistic) => change({ statistic })),
    rare(dropDown("Show", state.other ? [...SHOW, OF_TWO] : SHOW, app.mode, (mode) => change({ mode }))),
    content.hasRoles ? rare(dropDown("Order", ORDER, state.order, setOrder)) : null,
    rare(layersShown(state, grouping, change)),
    rare(search(state.search, change, () => app.actions.selectOnlyRow())),
    button("Reset zoom", {
      class: "reset",
      disabled: !isZoomed,
      onclick: () => app.actions.unzoom(),
      title: "Show everything (0)",
    }),
    button(`Alerts ${content.alertCount}`, { class: "drawer-open", onclick: () => app.openSide() }),
    rare(linking(app)),
    rare(saving(app)),
    content.live,
    button("More", {
      class: "more",
      "aria-expanded": String(node.classList.contains("full")),
      onclick: ({ currentTarget }) =>
        currentTarget.setAttribute("aria-expanded", String(node.classList.toggle("full"))),
    }),
  );
}

const SHOW = [
  ["value", "values"],
  ["own", "ratio to the layer's median"],
  ["depth", "ratio to the median layer"],
];
const OF_TWO = ["run", "ratio to the other run"];
const ORDER = [["depth", "by depth"], ["role", "by role"]];

/** Marks a control that is not always seen. */
function rare(node) {
  node.classList.add("rare");
  return node;
}

/** A button that copies a link to all that is seen. */
function linking({ address, state }) {
  const button = element("button", { title: "Copy link to this view", "aria-live": "polite" }, "Link");
  button.onclick = async () => {
    address.write(toLink(state), false);
    button.textContent = (await copyLink()) ? "Copied" : "See address";
  };
  return button;
}

/** Buttons that save the view. */
function saving(app) {
  const button = (kind) =>
    element(
      "button",
      {
        "aria-label": `Save as ${kind.toUpperCase()}`,
        onclick: () => saveView(app, kind).catch((error) => app.fail(error)),
      },
      kind.toUpperCase(),
    );
  const kinds = ["png", "svg", "csv"].map(button);
  const { run, other, checked } = app.state;
  const runs = [...new Set([run, other, ...checked].filter(Boolean))];
  const url = app.source.reportUrl?.(runs);
  const text = runs.length > 1 ? `Report of ${runs.length} runs` : "Report";
  if (url) kinds.push(element("a", { class: "button", href: url, download: "" }, text));
  return element(
    "details",
    { class: "menu" },
    element("summary", { dataset: { key: "save" } }, "Save"),
    element("div", {}, ...kinds),
  );
}

/** A run's name; a button where there are several. */
function runButton(label, name, runs, onclick) {
  const text = name || "none";
  const value =
    runs.length > 1
      ? element(
          "button",
          {
            class: "run-button",
            dataset: { key: label },
            "aria-haspopup": "dialog",
            "aria-label": `${label}: ${text}`,
            onclick,
          },
          element("span", {}, text),
          " ▾",
        )
      : element("b", { class: "run-name" }, text);
  value.title = text;
  return element("div", { class: "field" }, element("span", {}, label), value);
}

/** Which layers have a row: those with values, all of them, or groups in place of them. */
function layersShown(state, grouping, change) {
  const depths = deepest(grouping);
  const isFoldedAt = (depth) => {
    const paths = groupsAtDepth(grouping, depth);
    return paths.length === state.folded.size && paths.every((path) => state.folded.has(path));
  };
  const levels = Array.from({ length: depths }, (_, i) => i + 1);
  const level = levels.find(isFoldedAt) ?? "some";
  const at = (depth) => (state.order === "role" ? "one row per role" : `folded at depth ${depth}`);
  return dropDown(
    "Layers",
    [
      ["measured", "with values"],
      ["all", "all"],
      ...levels.map((depth) => [String(depth), at(depth)]),
      ...(state.folded.size && level === "some" ? [["some", "some folded"]] : []),
    ],
    state.folded.size ? String(level) : state.all ? "all" : "measured",
    (chosen) => change({ foldDepth: Number(chosen) || 0, all: chosen === "all", zoom: null }),
  );
}

/** A zoom into steps, of all rows. */
function keepSteps(zoom, whole) {
  return zoom && { ...zoom, row0: whole.row0, row1: whole.row1 };
}

function search(value, change, onEnter) {
  const input = element("input", {
    type: "search",
    placeholder: "name or class",
    title: "Part of a name or class; “pictures” lists the layers that have some",
    oninput: () => change({ search: input.value, zoom: null }),
    onkeydown: ({ key }) => key === "Enter" && onEnter(),
  });
  input.value = value;
  return element("label", { class: "field" }, element("span", {}, "Filter layers"), input);
}
