// The row of controls at the top.

import { dropDown, element, fill } from "./dom.js";
import { saveView } from "./export.js";
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
  const { statistics } = overview;
  const statisticOptions = statistics.map((known) => [known.name, known.title]);
  const current = statistics.find((known) => known.name === state.statistic);
  fill(
    node,
    runButton("Run", state.run, runs, () => app.actions.chooseRun("run")),
    runs.length > 1
      ? runButton("Beside", state.other, runs, () => app.actions.chooseRun("other"))
      : null,
    state.other
      ? element("button", { onclick: () => change({ other: "", zoom: null }) }, "One run")
      : null,
    dropDown("Statistic", statisticOptions, state.statistic, (statistic) => change({ statistic })),
    dropDown(
      "Show",
      [
        ["value", "values"],
        ["own", "relative to the layer's median"],
        ["depth", "relative to the median over depth"],
      ],
      state.mode,
      (mode) => change({ mode }),
    ),
    content.hasRoles
      ? dropDown(
          "Order",
          [
            ["depth", "by depth"],
            ["role", "by role"],
          ],
          state.order,
          (order) => change({ order, folded: new Set(), zoom: keepSteps(state.zoom, app.whole()) }),
        )
      : null,
    folding(state, grouping, change),
    search(state.search, change),
    element(
      "label",
      { class: "check", title: "Also layers without this statistic" },
      element("input", {
        type: "checkbox",
        checked: state.all,
        dataset: { key: "all" },
        onchange: () => change({ all: !state.all, zoom: null }),
      }),
      "all layers",
    ),
    element(
      "button",
      {
        class: "reset",
        disabled: !isZoomed,
        onclick: () => app.actions.unzoom(),
        title: "Show everything (0)",
      },
      "Reset zoom",
    ),
    element(
      "button",
      {
        class: "drawer-open",
        dataset: { key: "drawer" },
        onclick: () => {
          app.isSideOpen = true;
          app.draw();
        },
      },
      `Alerts ${content.alertCount}`,
    ),
    saving(app),
    content.live,
    element("p", { class: "description" }, current?.description ?? ""),
  );
}

/** Buttons that save what is shown. */
function saving(app) {
  const button = (kind) =>
    element(
      "button",
      {
        dataset: { key: kind },
        "aria-label": `Save as ${kind.toUpperCase()}`,
        onclick: () => saveView(app, kind).catch((error) => app.fail(error)),
      },
      kind.toUpperCase(),
    );
  return element(
    "div",
    { class: "field saving" },
    element("span", {}, "Save"),
    element("div", {}, button("png"), button("svg"), button("csv")),
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

function folding(state, grouping, change) {
  const depths = deepest(grouping);
  if (!depths) return null;
  const isFoldedAt = (depth) => {
    const paths = depth ? groupsAtDepth(grouping, depth) : [];
    return paths.length === state.folded.size && paths.every((path) => state.folded.has(path));
  };
  const depth = Array.from({ length: depths + 1 }, (_, i) => i).find(isFoldedAt);
  const at = (level) => (state.order === "role" ? "one row per role" : `folded at depth ${level}`);
  const options = Array.from({ length: depths }, (_, i) => [String(i + 1), at(i + 1)]);
  return dropDown(
    "Layers",
    [["0", "all"], ...options, ...(depth === undefined ? [["", "some folded"]] : [])],
    depth === undefined ? "" : String(depth),
    (level) => change({ foldDepth: Number(level) }),
  );
}

/** A zoom into steps, of all rows. */
function keepSteps(zoom, whole) {
  return zoom && { ...zoom, row0: whole.row0, row1: whole.row1 };
}

function search(value, change) {
  const input = element("input", {
    type: "search",
    placeholder: "name or class",
    oninput: () => change({ search: input.value, zoom: null }),
  });
  input.value = value;
  return element("label", { class: "field" }, element("span", {}, "Search"), input);
}
