// An agent in Node that only uses HTTP: it plays one rollout with a calculator as its tool. Run by
//   environment: "command:node examples/agents/calculator.mjs"
// which sets OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, ROLLSTREAM_ROLLOUT_URL and ROLLSTREAM_TASK.
const { OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, ROLLSTREAM_ROLLOUT_URL, ROLLSTREAM_TASK } = process.env;
const { inputs, max_turns } = JSON.parse(ROLLSTREAM_TASK);
const tools = [{
  type: "function",
  function: {
    name: "calculate",
    description: "Adds, subtracts, multiplies or divides two numbers.",
    parameters: {
      type: "object",
      properties: { a: { type: "number" }, operator: { enum: ["+", "-", "*", "/"] }, b: { type: "number" } },
      required: ["a", "operator", "b"],
    },
  },
}];

async function post(url, body, key) {
  const headers = { Authorization: `Bearer ${OPENAI_API_KEY}`, "Content-Type": "application/json", "Idempotency-Key": key };
  const answer = await fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error(`${url}: ${answer.status} ${await answer.text()}`);
  return answer.json();
}

function calculate({ a, operator, b }) {
  const results = { "+": a + b, "-": a - b, "*": a * b, "/": a / b };
  return String(results[operator] ?? `unknown operator ${operator}`);
}

const messages = [{ role: "user", content: inputs.question }];
let said = "";
for (let turn = 0; turn < max_turns; turn += 1) {
  const body = { model: OPENAI_MODEL, messages, tools };
  const { message } = (await post(`${OPENAI_BASE_URL}/chat/completions`, body, `turn ${turn}`)).choices[0];
  messages.push(message);
  said = message.content ?? "";
  if (!message.tool_calls) break;
  for (const call of message.tool_calls) {
    const { name, arguments: given } = call.function;
    const content = name === "calculate" ? calculate(JSON.parse(given)) : `unknown tool ${name}`;
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
}
await post(`${ROLLSTREAM_ROLLOUT_URL}/reward`, { value: said.trim() === String(inputs.answer) ? 1 : 0 }, "reward");
