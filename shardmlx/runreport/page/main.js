// Show the events that are in the page, and ask for more while the run goes on.
const DATA = JSON.parse(byId("data").textContent);
const SECONDS_BETWEEN = 2;
let lost = false;
let ended = false;
let startsShown = -1;

function status() {
  const step = format.count(lastStep());
  if (run.summary) {
    const since = run.resumes.length ? " from the last restart" : "";
    return ["finished", `finished in ${format.duration(run.summary.seconds)}${since}`];
  }
  if (run.stop) {
    const at = `at step ${format.count(run.stop.step)}`;
    if (typeof run.stop.signal !== "string") return ["bad", `failed ${at}`];
    return ["stopped", `stopped by ${run.stop.signal} ${at}`];
  }
  if (lost) return ["ended", `no answer: the run has ended or cannot be reached; step ${step}`];
  if (DATA.live && !ended) return ["running", run.starts.length ? "running" : "loading"];
  return [
    "ended",
    DATA.live ? `ended at step ${step}` : `no summary: still running, or ended at step ${step}`,
  ];
}

function show() {
  const [kind, words] = status();
  byId("status").className = kind;
  byId("status").textContent = words;
  header();
  tiles();
  curves();
  leftOutNote();
  rankTable();
  rankCurves();
  logTable();
  if (startsShown !== run.starts.length) {
    startsShown = run.starts.length;
    layoutAndSchedule();
    optionTables();
  }
  if (byId("numbers").open) numberTable();
  document.documentElement.dataset.shown = String(run.trains.length);
}

function showAnew() {
  forgetCharts();
  show();
}

const pause = () => new Promise((resume) => setTimeout(resume, 1000 * SECONDS_BETWEEN));

// Ask the server for what is new, again and again: it answers as soon as there is something. A run
// that was started anew, after a failure, begins anew here.
async function ask() {
  let seen = 0,
    who = null;
  for (;;) {
    try {
      const whose = who === null ? "" : `&run=${who}`;
      const answer = await fetch(`/events?after=${seen}${whose}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const more = await answer.json();
      if (who !== null && more.run !== who) {
        forget();
        startsShown = -1;
      }
      const isNew = more.events.length > 0 || lost || more.ended !== ended;
      [who, seen, lost, ended] = [more.run, more.last, false, more.ended];
      more.events.forEach(take);
      if (isNew) show();
      if (ended && (run.summary || run.stop)) return;
      if (ended) await pause();
    } catch {
      if (!lost && !ended) {
        lost = true;
        show();
      }
      await pause();
    }
  }
}

byId("numbers").addEventListener("toggle", () => {
  if (byId("numbers").open) numberTable();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showAnew);

DATA.events.forEach(take);
show();
if (DATA.live) ask();
