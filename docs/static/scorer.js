// The order of what a search finds: pages with all words in their title first, names of the API after them.

const words = (new URLSearchParams(window.location.search).get("q") ?? "").toLowerCase().split(/\s+/);
const stems = words.map((word) => word.replace(/(?<=\w{3})(e|ing|s)$/, "")); // fine-tune finds fine-tuning

var Scorer = {
  score: ([docname, title, anchor, description, score, filename, kind]) => {
    const page = title.toLowerCase().split(" > ")[0];
    const named = kind !== "object" && stems.every((stem) => page.includes(stem));
    return score + (named ? 25 : 0) + (named && page.startsWith(stems[0]) ? 5 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
