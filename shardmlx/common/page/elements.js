// Elements are made of text, never of markup: what a text says cannot become part of the page.
export const byId = (id) => document.getElementById(id);

export function fill(node, ...children) {
  node.replaceChildren();
  // One by one: a call takes only so many arguments.
  for (const each of children.flat()) {
    if (each !== null && each !== undefined) node.append(each);
  }
  return node;
}

export function element(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  return fill(node, ...children);
}

export function drawn(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return fill(node, ...children);
}
