// Simple Markdown as elements: what a model writes is only ever text in them, never HTML.

import { copyButton, make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const RULE = /^ {0,3}([-*_])\s*(\1\s*){2,}$/;
const DEEPEST = 8;

// Tried where one of these stands. All are bounded: a model that repeats itself for ever must not
// keep the browser busy.
const SPECIAL = /[`*[]/g;
const CODE = /`([^`]{1,2000})`(?!`)|``(.{1,1000}?)``(?!`)/sy;
const BOLD = /\*\*(?=\S)(.{1,1000}?)\*\*/sy;
const ITALIC = /(?<![\w*])\*(?=[^\s*])([^*]{1,1000})(?<=\S)\*(?![\w*])/sy;
const LINK = /\[([^[\]]{1,300})\]\((https?:\/\/[^\s()]{1,2000})\)/y;

/** Have an element show a text. What it shows already stays in place: a selection, and for those
    who listen, what they have heard. */
export function show(element, text) {
  const fresh = [...render(text).childNodes];
  const old = [...element.childNodes];
  let same = 0;
  while (same < fresh.length && same < old.length && old[same].isEqualNode(fresh[same])) same += 1;
  for (const node of old.slice(same)) node.remove();
  element.append(...fresh.slice(same));
}

/** A text as elements; an open code block ends with the text. */
function render(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = document.createDocumentFragment();
  while (lines.length) found.append(...block(lines, depth));
  return found;
}

/** Takes one block off the lines. */
function block(lines, depth) {
  const line = lines[0];
  if (!line.trim()) {
    lines.shift();
    return [];
  }
  const fence = FENCE.exec(line);
  if (fence) return [code(lines, fence)];
  const heading = HEADING.exec(line);
  if (heading) {
    lines.shift();
    // the page has headings of its own above these
    const level = Math.min(6, heading[1].length + 2);
    return [make(`h${level}`, "", ...inline(heading[2]))];
  }
  if (RULE.test(line)) {
    lines.shift();
    return [make("hr")];
  }
  if (depth < DEEPEST && QUOTE.test(line)) {
    return [make("blockquote", "", render(take(lines, QUOTE).join("\n"), depth + 1))];
  }
  if (depth < DEEPEST && ITEM.test(line)) return [list(lines, depth)];
  return [paragraph(lines)];
}

/** What is behind the mark, of all lines that have it. */
function take(lines, mark) {
  const taken = [];
  for (let match; lines.length && (match = mark.exec(lines[0])); lines.shift()) {
    taken.push(match[1]);
  }
  return taken;
}

function code(lines, [, mark, language]) {
  lines.shift();
  const inside = [];
  const end = new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},}\\s*$`);
  while (lines.length) {
    const line = lines.shift();
    if (end.test(line)) break;
    inside.push(line);
  }
  const text = inside.join("\n");
  const pre = make("pre", "", make("code", "", text));
  pre.tabIndex = 0;
  const head = make("div", "code-head", make("span", "", language), copyButton(() => text));
  return make("div", "code", head, pre);
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const found = make(ordered ? "ol" : "ul");
  if (ordered) found.start = parseInt(mark, 10);
  for (let match; lines.length && (match = ITEM.exec(lines[0])); ) {
    if (match[1].length < indent.length || /\d/.test(match[2]) !== ordered) break;
    lines.shift();
    const inside = [match[3], ...belonging(lines, match)].join("\n");
    found.append(make("li", "", render(inside, depth + 1)));
  }
  return found;
}

/** The lines that are further in than an item, without that indentation. */
function belonging(lines, [, indent, mark]) {
  const taken = [];
  while (lines.length) {
    const line = lines[0];
    const next = line.trim() ? line : lines.find((other) => other.trim());
    const inside = next !== undefined && indentation(next) >= indent.length + 2;
    // a list goes on after an empty line
    const goesOn = next !== undefined && !line.trim() && ITEM.test(next);
    if (!inside && !goesOn) break;
    taken.push(line.slice(Math.min(indentation(line), indent.length + mark.length + 1)));
    lines.shift();
  }
  return taken;
}

function indentation(line) {
  return line.length - line.trimStart().length;
}

function paragraph(lines) {
  const taken = [];
  const others = [FENCE, HEADING, QUOTE, RULE, ITEM];
  do taken.push(lines.shift());
  while (lines.length && lines[0].trim() && !others.some((other) => other.test(lines[0])));
  return make("p", "", ...inline(taken.join("\n")));
}

function inline(text) {
  const parts = [];
  let done = 0;
  SPECIAL.lastIndex = 0;
  for (let match; (match = SPECIAL.exec(text)); ) {
    const at = match.index;
    const found = styled(text, at);
    if (!found) continue;
    const [element, end] = found;
    parts.push(text.slice(done, at), element);
    done = SPECIAL.lastIndex = end;
  }
  parts.push(text.slice(done));
  return parts;
}

/** What begins at a place, as an element, and where it ends. */
function styled(text, at) {
  for (const [pattern, made] of STYLES) {
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    if (match) {
      const end = pattern.lastIndex;
      return [made(match), end];
    }
  }
  return null;
}

const STYLES = [
  [CODE, (match) => make("code", "", match[1] ?? match[2])],
  [BOLD, (match) => make("strong", "", ...inline(match[1]))],
  [ITALIC, (match) => make("em", "", ...inline(match[1]))],
  [LINK, (match) => link(match[1], match[2])],
];

function link(label, url) {
  const found = make("a", "", label);
  found.href = url;
  found.target = "_blank";
  found.rel = "noopener noreferrer";
  return found;
}
