"""An HTTP server over the engine: SGLang's `/generate`, OpenAI's `/v1`, health, metrics, control.

Needs the extra `serve`. `bijax serve` starts it; `create_app` gives the ASGI application to embed it elsewhere.
"""
