// Perfetto's trace processor as its own user interface runs it: a web worker around WebAssembly, here in Node.
//
// node engine.js FOLDER: requests come by standard input and replies go to standard output, each a
// TraceProcessorRpcStream behind its length (4 bytes, little endian).
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const host = process;

// The bundle asks where it is: these are what a worker has and Node lacks, or has otherwise.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = function () {};
globalThis.location = { href: `file://${folder}/engine_bundle.js` };
globalThis.XMLHttpRequest = class {
  open(_, url) {
    this.file = path.join(folder, path.basename(url));
  }
  send() {
    const bytes = fs.readFileSync(this.file);
    this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
  }
};
console.log = console.warn = (...words) => host.stderr.write(words.join(" ") + "\n");
Object.defineProperty(globalThis, "process", { value: undefined });

vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));

const port = {
  postMessage(reply) {
    const length = Buffer.alloc(4);
    length.writeUInt32LE(reply.length);
    fs.writeSync(1, length);
    for (let sent = 0; sent < reply.length; ) sent += fs.writeSync(1, reply, sent);
  },
};
globalThis.onmessage({ data: port });

// What is still to be made ready is so after the microtasks of this turn.
setImmediate(() => {
  const requests = fs.readFileSync(0);
  for (let at = 0; at < requests.length; ) {
    const end = at + 4 + requests.readUInt32LE(at);
    port.onmessage({ data: new Uint8Array(requests.subarray(at + 4, end)) });
    at = end;
  }
  host.exit(0);
});
