// Elements and their content. Everything that came from a run is set as text, never as markup;
// the one exception is a figure's drawing, which the server made.

/** An element with properties, attributes (`data-…`, `aria-…`), listeners (`onclick`) and children. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set text only where it differs, so that nothing flickers and a selection stays. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Replace what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
}

/** Put a server-made drawing into an element, if it is not the one that is there. */
export function setDrawing(element, svg) {
  if (element.drawing === svg) return;
  element.drawing = svg;
  const parsed = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
  element.replaceChildren(document.importNode(parsed, true));
}

const NUMBER = /^[+\-−–×]?[\d.,]+( ?[%a-zA-Zµ²]*)?$|^–$/;

/** A table of texts; columns that hold only numbers are set flush right. */
export function table(columns, rows, caption) {
  const isNumber = columns.map((_, at) => rows.length > 0 && rows.every((row) => NUMBER.test(row[at])));
  const kind = (at) => (isNumber[at] ? "number" : undefined);
  return el(
    "div",
    { className: "scroll", tabIndex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          columns.map((name, at) => el("th", { scope: "col", className: kind(at) }, name)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            {},
            row.map((text, at) => el("td", { className: kind(at) }, text)),
          ),
        ),
      ),
    ),
  );
}

/** Why something cannot be shown. */
export function problem(error) {
  return el("p", { className: "problem", role: "alert" }, error.message ?? String(error));
}
