// The form of plan.html: looks the numbers up that `strata plan` exported to plan.json, and adds activations.

const GIB = 2 ** 30;
const SPARE_PARTS = 20; // of a device, for torch, the driver and the collectives

// The rows of the grid for a choice: the same numbers as those of `strata plan --json`. Memory is in bytes; null: not
// named, so that no row that needs it is the best.
function planRows(data, choice) {
  const model = data.models[choice.model];
  const cells = model.bytes[choice.lora][choice.job];
  const ranks = data.jobs[choice.job][1];
  const activations = model.of_token[choice.checkpointing ? 1 : 0] * choice.tokens;
  const room = activations > 0 ? choice.device - Math.floor(choice.device / SPARE_PARTS) : choice.device;
  const rows = data.rows.map((row, i) => {
    const device = cells[i][0] + activations;
    const host = cells[i][1] * ranks;
    const drive = cells[i][2] * ranks;
    const lacking = [];
    if (device > room) lacking.push("device");
    if (choice.host !== null && host > choice.host) lacking.push("host");
    if (choice.drive !== null && drive > choice.drive) lacking.push("drive");
    const unnamed =
      (row.placement.endsWith("host") && choice.host === null) ||
      (row.placement.endsWith("NVMe") && choice.drive === null);
    return { stage: row.stage, placement: row.placement, device, host, drive, lacking, unnamed };
  });
  return { rows, activations, best: rows.findIndex((row) => row.lacking.length === 0 && !row.unnamed) };
}

function sizeText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (bytes >= 1024 && unit + 1 < units.length) {
    bytes /= 1024;
    unit += 1;
  }
  const digits = unit === 0 ? 0 : Math.max(0, 3 - String(Math.floor(bytes)).length);
  return bytes.toFixed(digits) + " " + units[unit];
}

function fillForm(data) {
  const form = document.getElementById("plan-form");
  const fill = (name, texts, chosen) => {
    texts.forEach((text, i) => form[name].add(new Option(text, i, i === chosen, i === chosen)));
  };
  const models = Object.keys(data.models);
  fill("model", models, models.indexOf("Qwen3-8B"));
  fill("job", data.jobs.map(([hosts, gpus]) => (hosts === 1 ? `${gpus}` : `${hosts} hosts of ${gpus}`)), 0);
  fill("lora", data.lora_ranks.map((rank) => (rank === 0 ? "all parameters" : `adapters of rank ${rank}`)), 0);
  const memory = (name) => (form[name].value === "" ? null : Number(form[name].value) * GIB);
  const show = () => {
    const result = planRows(data, {
      model: models[form.model.value],
      job: Number(form.job.value),
      lora: Number(form.lora.value),
      device: memory("device") ?? 0,
      host: memory("host"),
      drive: memory("drive"),
      tokens: Number(form.seq.value) * Number(form.micro.value),
      checkpointing: form.checkpointing.checked,
    });
    const body = document.getElementById("plan-rows");
    body.replaceChildren();
    result.rows.forEach((row, i) => {
      const line = body.insertRow();
      line.className = i === result.best ? "best" : row.lacking.length > 0 ? "lacking" : "";
      const fits = row.lacking.length > 0 ? "no: " + row.lacking.join(", ") : row.unnamed ? "name its memory" : "yes";
      [row.stage, row.placement, sizeText(row.device), sizeText(row.host), sizeText(row.drive), fits].forEach((text) => {
        line.insertCell().textContent = text;
      });
    });
    const best = result.rows[result.best];
    document.getElementById("plan-best").textContent = best
      ? `The fastest that fits: stage ${best.stage}, ${best.placement}.`
      : "Nothing fits the memory that is named.";
    document.getElementById("plan-activations").textContent = sizeText(result.activations);
  };
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}

if (typeof module !== "undefined") {
  module.exports = { planRows };
} else {
  fetch("plan.json")
    .then((answer) => answer.json())
    .then(fillForm)
    .catch((error) => {
      document.getElementById("plan-best").textContent =
        `plan.json cannot be read (${error.message}); open this page over HTTP, not as a file.`;
    });
}
