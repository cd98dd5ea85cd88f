// Puts the page together: which model, which view on a narrow screen, the key if one is wanted.

import { getJson, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { say } from "./dom.js";

const byId = (id) => document.getElementById(id);
const chat = new Chat();
const cluster = new Cluster();

async function meet() {
  try {
    const { data } = await getJson("v1/models");
    chat.model = data[0].id;
    say(byId("model"), chat.model);
    document.title = `${chat.model} – Caravan`;
  } catch {
    // the cluster, or the first message, tells what is wrong
  }
}

// a narrow screen shows one of the two
for (const button of document.querySelectorAll("[data-view]")) {
  button.addEventListener("click", () => {
    document.body.dataset.shows = button.dataset.view;
    for (const other of document.querySelectorAll("[data-view]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    chat.follow();
  });
}

addEventListener("key-wanted", () => {
  byId("key-field").hidden = false;
  byId("key").focus();
});

function useKey() {
  setKey(byId("key").value.trim());
  byId("key-field").hidden = true;
  meet();
  cluster.look();
  byId("prompt").focus();
}

byId("use-key").addEventListener("click", useKey);
byId("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  useKey();
});

meet();
// on a phone that would bring up the keyboard
if (!matchMedia("(pointer: coarse)").matches) chat.prompt.focus();
