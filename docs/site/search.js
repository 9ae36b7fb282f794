/* The site's search, read by the search page after Sphinx's options and before its program. */

/* Excerpts are read from the pages found, which a browser refuses for pages opened as files. */
if (window.location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

/* Order of what is found: Sphinx's scores, and above all of these the pages that are named by the
   words asked for.  "own images" leads to docs/own-images, "protocol" to docs/protocol. */

const stems = (text) => {
  const stemmer = new Stemmer(); // of the language of Sphinx's index
  const words = text.toLowerCase().match(/[\p{L}\p{N}]+/gu) || [];
  return words.filter((word) => !/^\d+$/.test(word)).map((word) => stemmer.stemWord(word));
};

/* Share of a name's words that were asked for; 0 where it lacks one of the words asked for. */
const share = (name, asked) => {
  const words = stems(name);
  if (!asked.length || !asked.every((word) => words.includes(word))) return 0;
  return asked.length / words.length;
};

var Scorer = {
  // As Sphinx has them.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: ([page, title, anchor, description, score]) => {
    if (anchor || description) return score; // a section or an object, not a page
    const asked = stems(new URLSearchParams(window.location.search).get("q") || "");
    const file = page.replace(/\/index$/, "").split("/").pop();
    return score + 60 * share(file, asked) + 30 * share(title, asked);
  },
};
