// Elements, made and filled without ever reading text as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element of a class, with what is in it: texts and other elements. */
export function make(tag, className = "", ...inside) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...inside);
  return element;
}

export function makeSvg(tag, attributes = {}, ...inside) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

export function button(text, onClick, className = "plain") {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", onClick);
  return element;
}

/** Set a text if it is another one: what stays the same is not read out again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Copies, and says so on the button for a moment. */
export function copyButton(text) {
  const element = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text());
      element.textContent = "Copied";
    } catch {
      element.textContent = "Not allowed";
    }
    setTimeout(() => (element.textContent = "Copy"), 1500);
  });
  return element;
}
