// What the keys do while the picture has the focus.

const FAR = 10;

/**
 * @param {HTMLElement} node
 * @param {Object} act `moveStep(count)`, `moveLayer(count)`, `firstStep()`, `lastStep()`,
 *   `zoom(factor)`, `unzoom()`, `close()`, `alert(direction)`, `fold()`, `search()`, `runs()`,
 *   `movers()`
 */
export function watchKeys(node, act) {
  node.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const by = event.shiftKey ? FAR : 1;
    const actions = {
      ArrowLeft: () => act.moveStep(-by),
      ArrowRight: () => act.moveStep(by),
      ArrowUp: () => act.moveLayer(-by),
      ArrowDown: () => act.moveLayer(by),
      PageUp: () => act.moveLayer(-FAR),
      PageDown: () => act.moveLayer(FAR),
      Home: () => act.moveStep(-Infinity),
      End: () => act.moveStep(Infinity),
      "+": () => act.zoom(0.5),
      "=": () => act.zoom(0.5),
      "-": () => act.zoom(2),
      0: () => act.unzoom(),
      Escape: () => act.close(),
      n: () => act.alert(1),
      p: () => act.alert(-1),
      f: () => act.fold(),
      "/": () => act.search(),
      r: () => act.runs(),
      w: () => act.movers(),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}

export const KEY_HELP =
  "Keys: arrows move (with Shift by ten), + and − zoom, 0 shows everything, n and p go to the next " +
  "and previous alert, f folds the group, / searches, r lists the runs, w tells who moved first, Esc closes.";
