//! A spec as YAML in block form, for people who read it. The guest publishes JSON, which agents
//! parse faster.

use serde_json::Value;

/// YAML of a JSON text; empty if the text is no JSON.
pub fn from_json(text: &[u8]) -> String {
    let mut out = String::new();
    if let Ok(value) = serde_json::from_slice(text) {
        block(&value, 0, &mut out);
    }
    out
}

/// Writes the lines of a list or a map; anything else on the current line.
fn block(value: &Value, depth: usize, out: &mut String) {
    let indent = |out: &mut String| (0..depth).for_each(|_| out.push_str("  "));
    match value {
        Value::Object(map) => {
            for (number, (key, value)) in map.iter().enumerate() {
                // The first key follows the dash of its list on the same line.
                if number > 0 || !out.ends_with("- ") {
                    indent(out);
                }
                out.push_str(key);
                out.push(':');
                below(value, depth + 1, out);
            }
        }
        Value::Array(list) => {
            for value in list {
                indent(out);
                out.push_str("- ");
                match value {
                    Value::Object(_) => block(value, depth + 1, out),
                    _ => line(value, out),
                }
            }
        }
        _ => line(value, out),
    }
}

fn below(value: &Value, depth: usize, out: &mut String) {
    let empty = value.as_array().is_some_and(Vec::is_empty)
        || value.as_object().is_some_and(serde_json::Map::is_empty);
    if !empty && (value.is_object() || value.is_array()) {
        out.push('\n');
        block(value, depth, out);
    } else {
        out.push(' ');
        line(value, out);
    }
}

/// Writes a string or a number in JSON's form, which is YAML's, too.
fn line(value: &Value, out: &mut String) {
    out.push_str(&value.to_string());
    out.push('\n');
}

#[cfg(test)]
mod tests {
    #[test]
    fn lists_of_maps_of_lists_keep_their_depth() {
        let json = br#"{"cdiVersion":"0.5.0","devices":[{"name":"0","containerEdits":{
            "deviceNodes":[{"path":"/dev/x","major":195},{"path":"/y"}],"env":["A=b"]}}],
            "none":[]}"#;
        let yaml = super::from_json(json);
        let wanted = [
            "cdiVersion: \"0.5.0\"",
            "devices:",
            "  - containerEdits:",
            "      deviceNodes:",
            "        - major: 195",
            "          path: \"/dev/x\"",
            "        - path: \"/y\"",
            "      env:",
            "        - \"A=b\"",
            "    name: \"0\"",
            "none: []",
        ];
        assert_eq!(yaml.lines().collect::<Vec<_>>(), wanted);
    }
}
