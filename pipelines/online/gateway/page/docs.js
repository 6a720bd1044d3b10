// The API's documentation; "Authorize" takes the API key.
SwaggerUIBundle({ url: "openapi.json", dom_id: "#docs", deepLinking: true, persistAuthorization: false });
