// Plays each recording that a page links to, in the place of the link. Without JavaScript it stays.
// FILE.cast#t=60 shows what is on the terminal after 60 s, until the recording is started.
// The player is asciinema-player 3.17.0 as npm has it (Apache 2.0, LICENSE).
const links = document.querySelectorAll('a[href*=".cast"]');
const player = document.currentScript.src.replace("start.js", "asciinema-player");

function load(element) {
  return new Promise((resolve) => {
    element.onload = resolve;
    document.head.append(element);
  });
}

async function play() {
  const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: `${player}.css` });
  const script = Object.assign(document.createElement("script"), { src: `${player}.min.js` });
  await Promise.all([load(style), load(script)]);
  for (const link of links) {
    const place = document.createElement("div");
    link.replaceWith(place);
    const seconds = new URLSearchParams(link.hash.slice(1)).get("t") ?? "0";
    AsciinemaPlayer.create(link.href, place, { fit: "width", poster: `npt:${seconds}` });
  }
}

if (links.length) play();
