// Views 9 and 10: orders for the run that this process trains. Each is asked for once more, and becomes a mark.
import { html, useData, useState, Problem } from "./ui.js";
import { post } from "./api.js";

const SETTINGS = { learning_rate: "learning rate", kl_beta: "weight of the KL (kl_beta)", temperature: "temperature of the rollouts" };
const LATER = "It will be done when the step that is being trained ends; then there is a mark on the charts.";

/** A button that asks once more; `act` returns a promise of a sentence. */
function Order({ name, ask, yes, act, done, danger, disabled, children }) {
  const [stage, setStage] = useState(""), [result, setResult] = useState(null);
  const perform = async () => {
    setStage("working");
    try {
      setResult({ text: await act() });
      done?.();
    } catch (error) {
      setResult({ error });
    }
    setStage("");
  };
  return html`<div class="order">
    <div class="filters">${children}
      ${stage === "" ? html`<button type="button" key="order" class=${danger ? "careful" : ""} disabled=${disabled} onClick=${() => { setResult(null); setStage("asking"); }}>${name}</button>`
        : html`<span class="asking" key="asking" role="group" aria-label=${name}><span>${ask}</span>
          <button type="button" class=${danger ? "danger" : "primary"} disabled=${stage === "working"} onClick=${perform}>${yes}</button>
          <button type="button" disabled=${stage === "working"} onClick=${() => setStage("")}>No</button></span>`}</div>
    ${result?.text && html`<p class="quiet" role="status">${result.text}</p>`}
    <${Problem} error=${result?.error} /></div>`;
}

const order = async (body, done) => {
  const answer = await post("/dashboard/api/control", body);
  return answer.status === "waiting" ? LATER : done(answer.result ?? {});
};

async function rollBack(target, version) {
  const answer = await post("/v1/training/rollback", version ? { version: Number(version[1]) } : { checkpoint: target });
  return answer.status === "done" ? `Done: they are version ${answer.policy_version} now.` : LATER;
}

export function Controls({ run, info, words, metrics }) {
  const [turn, setTurn] = useState(0);
  const state = useData(info?.live ? "control" : "", { run }, `${words?.marks}${words?.metrics}${turn}`);
  const [note, setNote] = useState(""), [target, setTarget] = useState(""), [typed, setTyped] = useState({});
  if (info && !info.live) return html`<p class="empty">This process does not train the run: there is nothing to control.</p>`;
  const known = state.data, again = () => setTurn(turn + 1), paused = known?.paused;
  if (!known) return html`<${Problem} error=${state.error} />`;
  const version = /^\s*(?:version )?(\d+)\s*$/.exec(target);
  const differs = (key) => typed[key] !== undefined && typed[key] !== "" && Number(typed[key]) !== known.settings[key];
  const changes = Object.fromEntries(Object.keys(SETTINGS).filter(differs).map((key) => [key, Number(typed[key])]));
  const inWords = Object.entries(changes).map(([key, value]) => `${key} ${known.settings[key]} → ${value}`).join(", ");
  return html`<div class="controls">
    <section class="panel" aria-label="run"><h2>Run</h2>
      <${Order} name=${paused ? "Resume" : "Pause"} ask=${paused ? "Let the engine go on?" : "Let every request stand still, and the training wait?"} yes=${paused ? "Yes, resume" : "Yes, pause"}
        act=${() => order({ action: paused ? "resume" : "pause" }, () => "Done.")} done=${again} />
      <p class="quiet">${paused ? "Everything stands still: rollouts, requests of others, and the training when it needs a batch." : "A pause holds rollouts and requests of others where they are. Nothing is lost."}</p>
      <${Order} name="Checkpoint now" ask="Save a checkpoint at the end of this step?" yes="Yes, save" act=${() => order({ action: "checkpoint" }, ({ checkpoint }) => `Saved: ${checkpoint}.`)} done=${again} />
      <${Order} name="Stop" ask="Save a checkpoint, and end the run and this server?" yes="Yes, stop" danger act=${() => order({ action: "stop" }, () => "It saves and ends. To go on: mlx_parallm train --resume.")} /></section>
    <section class="panel" aria-label="note"><h2>Note</h2>
      <${Order} name="Note it" ask=${`Write this at step ${metrics?.steps.at(-1) ?? 0}?`} yes="Yes, write" disabled=${!note.trim()} act=${() => order({ action: "note", text: note }, () => "It is on the charts.")} done=${() => setNote("")}>
        <input aria-label="note" maxlength="400" size="36" value=${note} placeholder="what changed, what you saw" onInput=${(event) => setNote(event.target.value)} /></${Order}></section>
    <section class="panel" aria-label="roll back"><h2>Roll back</h2>
      <${Order} name="Roll back" danger ask=${`Train and serve the weights of ${target.trim()} again?`} yes="Yes, roll back" disabled=${!target.trim()} done=${again} act=${() => rollBack(target.trim(), version)}>
        <input aria-label="version or checkpoint" list="checkpoints" value=${target} placeholder="version 12 or step_000120" onInput=${(event) => setTarget(event.target.value)} />
        <datalist id="checkpoints">${known.checkpoints.map((name) => html`<option value=${name}></option>`)}</datalist></${Order}>
      <p class="quiet">The steps go on counting; the optimizer goes back too.</p></section>
    <section class="panel" aria-label="settings"><h2>Settings</h2>
      ${known.fixed && html`<p class="quiet">They stay as they are: ${known.fixed}.</p>`}
      <div class="models numbers">${Object.entries(SETTINGS).map(([key, label]) => html`<label><span>${label}</span><input type="number" step="any" min="0" name=${key} disabled=${!!known.fixed} value=${typed[key] ?? known.settings[key]} onInput=${(event) => setTyped({ ...typed, [key]: event.target.value })} /></label>`)}</div>
      <${Order} name="Change" ask=${`From the next step on: ${inWords}?`} yes="Yes, change" disabled=${!!known.fixed || !inWords} act=${() => order({ action: "change", settings: changes }, () => "Changed, and saved in a checkpoint.")} done=${() => { setTyped({}); again(); }} />
      <p class="quiet">A resume goes on with them. A checkpoint is saved with each change.</p></section>
  </div>`;
}
