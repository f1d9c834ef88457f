// Builds elements. Text always goes in as text, so names and messages can never become markup.

/**
 * @param {string} tag
 * @param {Object<string, any>} [properties] `class`, `dataset`, `on…` listeners, other attributes
 * @param {...(Node|string|null)} children
 * @returns {any}
 */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(node.dataset, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

/** Replaces everything inside; the focus stays on the element with the same `data-key`. */
export function fill(node, ...children) {
  const focused = node.contains(document.activeElement) && document.activeElement.dataset.key;
  node.replaceChildren(...children.filter((child) => child != null));
  if (focused) node.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

/** The name of a layer, which breaks behind its dots. */
export function layerName(name) {
  return element("span", { class: "alert-layer" }, ...name.split(/(?<=\.)/).flatMap((part) => [part, element("wbr")]));
}

/** A labelled drop-down list; `options` are `[value, text]`. */
export function dropDown(label, options, value, onChange) {
  const select = element(
    "select",
    { dataset: { key: label }, onchange: () => onChange(select.value) },
    ...options.map(([key, text]) => element("option", { value: key }, text)),
  );
  select.value = value;
  return element("label", { class: "field" }, element("span", {}, label), select);
}
