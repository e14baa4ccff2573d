// Markdown: the blocks of a text, made of elements.
import { copyButton } from "./buttons.js";
import { element } from "./elements.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(```|~~~)/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +/;
const QUOTE = /^ {0,3}> ?/;
const LINE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const RULE = /^ {0,3}\|?[ :]*-+[ :]*(?:\|[ :]*-+[ :]*)*(?:\| *)?$/;
/** What ends a paragraph without a blank line. */
const STARTS = [FENCE, HEADING, ITEM, QUOTE, LINE];
/** Lists and quotes deeper than this are shown as they are written. */
const DEEPEST = 6;
/** So are tables of more columns and blocks of more characters: a browser takes too long. */
const MOST_COLUMNS = 100;
const LONGEST = 50_000;

/** Returns the blocks of a text: what builds each, and its source. */
function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  for (let start = 0, end; start < lines.length; start = end) {
    const line = lines[start];
    end = start + 1;
    let build = paragraph;
    if (!line.trim()) continue;
    if (FENCE.test(line)) {
      const mark = line.match(FENCE)[1];
      build = codeBlock;
      while (end < lines.length && !lines[end].trim().startsWith(mark)) end++;
      end++;
    } else if (HEADING.test(line)) {
      build = heading;
    } else if (LINE.test(line)) {
      build = () => element("hr");
    } else if (QUOTE.test(line)) {
      build = quote;
      while (end < lines.length && QUOTE.test(lines[end])) end++;
    } else if (beginsTable(lines, start)) {
      build = table;
      end++;
      while (end < lines.length && lines[end].includes("|")) end++;
    } else if (ITEM.test(line)) {
      build = list;
      end = endOfList(lines, start);
    } else {
      const starts = (next) => STARTS.some((each) => each.test(next));
      const goesOn = (at) => lines[at].trim() && !starts(lines[at]) && !beginsTable(lines, at);
      while (end < lines.length && goesOn(end)) end++;
    }
    const source = lines.slice(start, end).join("\n");
    found.push([source.length > LONGEST && build !== codeBlock ? plain : build, source]);
  }
  return found;
}

function cellsOf(line) {
  const row = line.trim().replace(/^\||(?<!\\)\|$/g, "");
  return row.split(/(?<!\\)\|/);
}

/** Tells whether a row of names and a rule with as many columns begin at a line. */
function beginsTable(lines, at) {
  const [names, rule] = [lines[at], lines[at + 1] ?? ""];
  if (!names.includes("|") || !rule.includes("|") || !RULE.test(rule)) return false;
  const columns = cellsOf(names).length;
  return columns <= MOST_COLUMNS && columns === cellsOf(rule).length;
}

function table(source) {
  const [names, rule, ...rows] = source.split("\n").map(cellsOf);
  const sides = rule.map((cell) => {
    const [left, right] = [cell.trim().startsWith(":"), cell.trim().endsWith(":")];
    return right ? (left ? "center" : "right") : "";
  });
  const cell = (tag, text, side) =>
    element(tag, { className: side }, inline(text.trim().replaceAll("\\|", "|")));
  const row = (tag, cells) => {
    const made = names.map((_, at) => cell(tag, cells[at] ?? "", sides[at]));
    return element("tr", {}, made);
  };
  const under = rows.map((cells) => row("td", cells));
  const head = element("thead", {}, row("th", names));
  const whole = element("table", {}, head, element("tbody", {}, under));
  return element("div", { className: "table", ...scrolled("Table") }, whole);
}

/** Returns the properties of what may be wider than the page: keys scroll it. */
function scrolled(what) {
  return { tabIndex: 0, role: "group", "aria-label": what };
}

const isOrdered = (item) => /\d/.test(item[2][0]);
const indent = (line) => line.length - line.trimStart().length;

/** Returns the line after a list: what is indented, or has no blank line before it, is in it. */
function endOfList(lines, start) {
  const first = lines[start].match(ITEM);
  let end = start + 1;
  for (let at = end; at < lines.length; at++) {
    const line = lines[at];
    if (!line.trim()) continue;
    const inside = indent(line) > first[1].length + 1;
    const item = line.match(ITEM);
    if (!inside && item && isOrdered(item) !== isOrdered(first)) break;
    if (!inside && !item && (at > end || FENCE.test(line) || HEADING.test(line))) break;
    end = at + 1;
  }
  return end;
}

function list(source, depth) {
  const first = source.match(ITEM);
  const items = [];
  for (const line of source.split("\n")) {
    const item = line.match(ITEM);
    if (item && item[1].length <= first[1].length + 1) {
      items.push({ width: item[0].length, lines: [line.slice(item[0].length)] });
    } else {
      const { width, lines } = items.at(-1);
      lines.push(line.slice(Math.min(indent(line), width)));
    }
  }
  const node = element(isOrdered(first) ? "ol" : "ul");
  if (isOrdered(first)) node.start = parseInt(first[2], 10);
  for (const { lines } of items) {
    const child = element("li");
    within(child, lines.join("\n").trimEnd(), depth);
    node.append(child);
  }
  return node;
}

function quote(source, depth) {
  const node = element("blockquote");
  within(node, source.replace(new RegExp(QUOTE, "gm"), ""), depth);
  return node;
}

function within(node, text, depth) {
  if (depth < DEEPEST) show(node, text, depth + 1);
  else node.textContent = text;
}

function codeBlock(source) {
  const [opening, ...lines] = source.split("\n");
  const mark = opening.match(FENCE)[1];
  if (lines.length && lines.at(-1).trim().startsWith(mark)) lines.pop();
  const language = opening.replace(/^\s*[`~]+/, "").trim();
  const code = lines.join("\n");
  const copying = copyButton("Copy the code", () => code);
  const bar = element("div", {}, element("span", {}, language || "code"), copying);
  const pre = element("pre", scrolled("Code"), element("code", {}, code));
  return element("div", { className: "code" }, bar, pre);
}

function heading(source) {
  const [, marks, text] = source.match(HEADING);
  return element(`h${Math.min(marks.length + 2, 5)}`, {}, inline(text));
}

function paragraph(source) {
  return element("p", {}, inline(source));
}

function plain(source) {
  return element("p", {}, source);
}

const SOURCES = new WeakMap();

/** Shows a text as Markdown. Blocks that did not change since the last call are left alone, so
 *  that a long answer streams fast and what is selected in it stays so. */
export function show(node, text, depth = 0) {
  const wanted = blocks(text);
  wanted.forEach(([build, source], index) => {
    const old = node.children[index];
    if (old && SOURCES.get(old) === source) return;
    const fresh = build(source, depth);
    SOURCES.set(fresh, source);
    if (old) old.replaceWith(fresh);
    else node.append(fresh);
  });
  while (node.children.length > wanted.length) node.lastElementChild.remove();
}
