// Choosing one life of a run.

import { el, fill } from "./dom.js";

/** Two lists, one for the round or life and one for the environment, and the steps between lives. */
export function lifeChooser(onChange) {
  const episodes = el("select", { "aria-label": "which round or life", onchange: () => choose() });
  const envs = el("select", { "aria-label": "which environment", onchange: () => choose() });
  const button = (text, step, key) =>
    el(
      "button",
      {
        type: "button",
        title: key,
        "aria-label": step < 0 ? "the life before" : "the life after",
        onclick: () => move(step),
      },
      text,
    );
  const element = el(
    "span",
    { className: "life" },
    button("‹", -1, "["),
    episodes,
    envs,
    button("›", 1, "]"),
  );
  let lives = [];
  let chosen = null;
  let isChosenByHand = false;

  const same = (one, other) => one && other && one.env === other.env && one.episode === other.episode;
  function show() {
    if (!chosen) return;
    const rounds = [...new Map(lives.map((life) => [life.episode, life.group])).entries()];
    options(
      episodes,
      rounds.map(([episode, group]) => [String(episode), group]),
      String(chosen.episode),
    );
    const beside = lives.filter((life) => life.episode === chosen.episode);
    options(
      envs,
      beside.map((life) => [String(life.env), `env ${life.env} · ${life.score}`]),
      String(chosen.env),
    );
    envs.hidden = lives.every((life) => life.env === lives[0].env);
  }
  function choose() {
    const episode = Number(episodes.value);
    const beside = lives.filter((life) => life.episode === episode);
    select(beside.find((life) => life.env === Number(envs.value)) ?? beside[0]);
  }
  function select(life) {
    if (!life) return;
    chosen = { env: life.env, episode: life.episode };
    isChosenByHand = true;
    show();
    onChange();
  }
  function move(step) {
    const at = lives.findIndex((life) => same(life, chosen));
    select(lives[Math.min(Math.max(at + step, 0), lives.length - 1)]);
  }
  return {
    element,
    move,
    life: () => chosen,
    setLives(found, standard) {
      lives = found;
      // Who has chosen a life stays with it; who has not sees the one that the run would show.
      if (!isChosenByHand || !lives.some((life) => same(life, chosen))) chosen = standard;
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
