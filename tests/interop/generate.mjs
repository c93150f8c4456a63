// Loads a GGUF file in stock llama.cpp (the ready library of the npm package node-llama-cpp, nothing built here) and
// lets it answer one question greedily, with the chat template that the file carries.
//
//     npm install node-llama-cpp
//     node generate.mjs FILE.gguf "What is the capital of France?" ["text that the answer must hold"]
//
// Prints the answer; exit code 0 only if the file loads, text comes out, and the wanted text is in it.

import { getLlama, LlamaChatSession } from "node-llama-cpp";

const [file, question, wanted] = process.argv.slice(2);
if (!file || !question) {
  console.error("usage: node generate.mjs FILE.gguf QUESTION [WANTED]");
  process.exit(2);
}
const llama = await getLlama({ build: "never", gpu: false, logLevel: "error" });
const model = await llama.loadModel({ modelPath: file });
const context = await model.createContext({ contextSize: 512 });
const session = new LlamaChatSession({ contextSequence: context.getSequence() });
const answer = await session.prompt(question, { temperature: 0, maxTokens: 48 });
console.log(answer.trim());
await llama.dispose();
process.exit(answer.trim() && (!wanted || answer.includes(wanted)) ? 0 : 1);
