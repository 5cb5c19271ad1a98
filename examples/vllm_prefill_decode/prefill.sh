#!/usr/bin/env bash
# The engine that prefills: ./prefill.sh MODEL
exec vllm serve "${1:?which model}" --port 8100 --kv-transfer-config '{
  "kv_connector": "AsyncKVConnector",
  "kv_connector_module_path": "asynckv.integrations.vllm",
  "kv_role": "kv_producer",
  "kv_connector_extra_config": {"listen": "tcp://127.0.0.1:14579"}
}' "${@:2}"
