// Choosing one episode of a run.

import { el, fill } from "./dom.js";

/** Two lists, one for the iteration or episode and one for the environment, and the steps between episodes. */
export function episodeChooser(onChange) {
  const episodes = el("select", { "aria-label": "which iteration or episode", onchange: () => choose() });
  const envs = el("select", { "aria-label": "which environment", onchange: () => choose() });
  const button = (text, step, key) =>
    el(
      "button",
      {
        type: "button",
        title: key,
        "aria-label": step < 0 ? "the episode before" : "the episode after",
        onclick: () => move(step),
      },
      text,
    );
  const element = el(
    "span",
    { className: "episode" },
    button("‹", -1, "["),
    episodes,
    envs,
    button("›", 1, "]"),
  );
  let episodes = [];
  let chosen = null;
  let isChosenByHand = false;

  const same = (one, other) => one && other && one.env === other.env && one.episode === other.episode;
  function show() {
    if (!chosen) return;
    const iterations = [...new Map(episodes.map((episode) => [episode.episode, episode.group])).entries()];
    options(
      episodes,
      iterations.map(([episode, group]) => [String(episode), group]),
      String(chosen.episode),
    );
    const beside = episodes.filter((episode) => episode.episode === chosen.episode);
    options(
      envs,
      beside.map((episode) => [String(episode.env), `env ${episode.env} · ${episode.score}`]),
      String(chosen.env),
    );
    envs.hidden = episodes.every((episode) => episode.env === episodes[0].env);
  }
  function choose() {
    const episode = Number(episodes.value);
    const beside = episodes.filter((episode) => episode.episode === episode);
    select(beside.find((episode) => episode.env === Number(envs.value)) ?? beside[0]);
  }
  function select(episode) {
    if (!episode) return;
    chosen = { env: episode.env, episode: episode.episode };
    isChosenByHand = true;
    show();
    onChange();
  }
  function move(step) {
    const at = episodes.findIndex((episode) => same(episode, chosen));
    select(episodes[Math.min(Math.max(at + step, 0), episodes.length - 1)]);
  }
  return {
    element,
    move,
    episode: () => chosen,
    setEpisodes(found, standard) {
      episodes = found;
      // Who has chosen an episode stays with it; who has not sees the one that the run would show.
      if (!isChosenByHand || !episodes.some((episode) => same(episode, chosen))) chosen = standard;
      show();
    },
  };
}

function options(list, entries, value) {
  const shown = JSON.stringify(entries);
  if (list.dataset.shown !== shown) {
    list.dataset.shown = shown;
    fill(
      list,
      entries.map(([key, text]) => el("option", { value: key }, text)),
    );
  }
  list.value = value;
}
