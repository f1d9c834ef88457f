// The row of controls at the top.

import { dropDown, element, fill } from "./dom.js";

/**
 * @param {HTMLElement} node
 * @param {Object} content `state`, `runs`, `statistics`, `depths` (number of group levels)
 * @param {(changes: Object) => void} change
 */
export function drawToolbar(
  node,
  { state, runs, statistics, depths, foldedDepth, isZoomed },
  change,
) {
  // Rebuilding a control that has the focus would take it away.
  if (node.contains(document.activeElement) && document.activeElement.type === "search") return;
  const runOptions = runs.map((run) => [run.name, run.name]);
  const statisticOptions = statistics.map((known) => [known.name, known.title]);
  const current = statistics.find((known) => known.name === state.statistic);
  fill(
    node,
    dropDown("Run", runOptions, state.run, (run) => change({ run, zoom: null })),
    runs.length > 1
      ? dropDown(
          "Beside",
          [["", "none"], ...runOptions.filter(([name]) => name !== state.run)],
          state.other,
          (other) => change({ other, zoom: null }),
        )
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
    depths
      ? dropDown(
          "Layers",
          [
            ["0", "all"],
            ...Array.from({ length: depths }, (_, i) => [
              String(i + 1),
              `folded at depth ${i + 1}`,
            ]),
            ...(foldedDepth === "" ? [["", "some folded"]] : []),
          ],
          foldedDepth,
          (depth) => change({ foldDepth: Number(depth) }),
        )
      : null,
    search(state.search, change),
    element(
      "label",
      { class: "check", title: "Also layers without this statistic" },
      element("input", {
        type: "checkbox",
        checked: state.all,
        onchange: () => change({ all: !state.all, zoom: null }),
      }),
      "all layers",
    ),
    element(
      "button",
      {
        class: "reset",
        disabled: !isZoomed,
        onclick: () => change({ zoom: null }),
        title: "Show everything (0)",
      },
      "Reset zoom",
    ),
    element("p", { class: "description" }, current?.description ?? ""),
  );
}

function search(value, change) {
  const input = element("input", {
    type: "search",
    placeholder: "name or class",
    "aria-label": "Search layers",
    oninput: () => change({ search: input.value, zoom: null }),
  });
  input.value = value;
  return element("label", { class: "field" }, element("span", {}, "Search"), input);
}
