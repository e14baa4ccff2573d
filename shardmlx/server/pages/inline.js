// What stands in a line of Markdown: code, links, what is bold or stressed.
import { element } from "./elements.js";

// None of these backtracks for long.
const INLINE = new RegExp(
  [
    /\\([\\`*_#.+\-[\]()|])/,
    /``(.+?)``/,
    /`([^`]+)`/,
    /\[([^[\]]+)\]\(([^\s()]+(?:\([^\s()]*\)[^\s()]*)*)\)/,
    /(https?:\/\/[^\s<>"'`\\]*[^\s<>"'`\\.,:;!?)\]*_])/,
    /\*\*(?=\S)((?:[^*]|\*(?!\*)|\*(?=\*\*(?!\*)))+)\*\*/,
    /\*([^\s*](?:[^*]*[^\s*])?)\*/,
    /(?<!\w)_([^\s_](?:[^_]*[^\s_])?)_(?!\w)/,
  ]
    .map((part) => part.source)
    .join("|"),
  "gs",
);

/** Returns a link that says where it leads; what leads nowhere safe stays the text that it is. */
function link(label, target, whole) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return [whole];
  }
  if (!["http:", "https:"].includes(url.protocol) || url.username || url.password) return [whole];
  const node = element("a", { href: url.href, target: "_blank", title: url.href }, label);
  node.rel = "noopener noreferrer nofollow";
  return label === target ? [node] : [node, element("small", {}, ` (${url.host})`)];
}

/** Returns a text's parts: strings, and the elements between them. */
export function inline(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, escaped, code2, code, label, target, bare, bold, star, underscore] = match;
    parts.push(text.slice(end, match.index));
    end = match.index + whole.length;
    if (escaped) parts.push(escaped);
    else if (code2 ?? code) parts.push(element("code", {}, code2?.trim() ?? code));
    else if (label) parts.push(...link(label, target, whole));
    else if (bare) parts.push(...link(bare, bare, bare));
    else if (bold) parts.push(element("strong", {}, inline(bold)));
    else parts.push(element("em", {}, inline(star ?? underscore)));
  }
  parts.push(text.slice(end));
  return parts;
}
