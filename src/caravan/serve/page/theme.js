// Dark or light: the system's choice, or the one made with the button, before anything is drawn.
"use strict";
(() => {
  const KEY = "caravan.theme";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem(KEY);
  } catch {
    // a browser that keeps nothing: the system's choice it is
  }

  function show() {
    root.dataset.theme = chosen ?? (dark.matches ? "dark" : "light");
    const button = document.getElementById("theme");
    button?.setAttribute("aria-pressed", String(root.dataset.theme === "dark"));
  }

  function toggle() {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, chosen);
    } catch {
      // for this visit, then
    }
    show();
  }

  show();
  dark.addEventListener("change", show);
  addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme").addEventListener("click", toggle);
  });
})();
