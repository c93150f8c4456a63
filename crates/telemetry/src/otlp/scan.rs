//! A cursor over JSON text (RFC 8259) that builds nothing: strings are borrowed where they hold no escapes, numbers are
//! their text, and what nobody asks for is skipped. Nesting is bounded. Invalid UTF-8 and lone surrogates inside a string
//! are repaired and counted, so that they cost one field and not the batch.

use super::value::text;
use crate::column::Text;

/// Levels of nesting that are followed; more is refused.
const DEPTH: usize = 128;

/// Why a body is not JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} at byte {at}")]
pub struct Syntax {
    pub what: &'static str,
    pub at: usize,
}

/// Result of one step.
pub type Parsed<T> = Result<T, Syntax>;

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Object,
    Array,
    String,
    Number,
    Bool,
    Null,
}

/// The cursor.
#[derive(Debug, Clone)]
pub struct Scanner<'a> {
    body: &'a [u8],
    at: usize,
    /// Strings that had to be repaired so far.
    pub repaired: u32,
}

impl<'a> Scanner<'a> {
    #[must_use]
    pub fn new(body: &'a [u8]) -> Self {
        Self { body, at: 0, repaired: 0 }
    }

    /// Offset in the body, for [`Self::raw`].
    #[must_use]
    pub fn at(&self) -> usize {
        self.at
    }

    /// A cursor at an offset this one was at before.
    #[must_use]
    pub fn back_at(&self, at: usize) -> Self {
        Self { body: self.body, at, repaired: 0 }
    }

    fn fail<T>(&self, what: &'static str) -> Parsed<T> {
        Err(Syntax { what, at: self.at })
    }

    fn next_byte(&mut self) -> Option<u8> {
        while let Some(b) = self.body.get(self.at) {
            if !matches!(b, b' ' | b'\n' | b'\r' | b'\t') {
                return Some(*b);
            }
            self.at += 1;
        }
        None
    }

    fn eat(&mut self, byte: u8) -> bool {
        let found = self.next_byte() == Some(byte);
        self.at += usize::from(found);
        found
    }

    /// Kind of the next value.
    ///
    /// # Errors
    /// When no value begins here.
    pub fn kind(&mut self) -> Parsed<Kind> {
        match self.next_byte() {
            Some(b'{') => Ok(Kind::Object),
            Some(b'[') => Ok(Kind::Array),
            Some(b'"') => Ok(Kind::String),
            Some(b'-' | b'0'..=b'9') => Ok(Kind::Number),
            Some(b't' | b'f') => Ok(Kind::Bool),
            Some(b'n') => Ok(Kind::Null),
            Some(_) => self.fail("no JSON value"),
            None => self.fail("the text ends"),
        }
    }

    /// Nothing but white space may follow.
    ///
    /// # Errors
    /// When something does.
    pub fn end(&mut self) -> Parsed<()> {
        match self.next_byte() {
            None => Ok(()),
            Some(_) => self.fail("something follows the value"),
        }
    }

    /// The next key of an object; `None` at its end. `first` is true right after the opening brace.
    ///
    /// # Errors
    /// Of the syntax.
    pub fn key(&mut self, first: bool) -> Parsed<Option<Text<'a>>> {
        if self.eat(b'}') {
            return Ok(None);
        }
        if !first && !self.eat(b',') {
            return self.fail("`,` or `}` is missing");
        }
        if self.next_byte() != Some(b'"') {
            return self.fail("a key is missing");
        }
        let key = self.string()?;
        if self.eat(b':') { Ok(Some(key)) } else { self.fail("`:` is missing") }
    }

    /// Whether an array has a next element. `first` is true right after the opening bracket.
    ///
    /// # Errors
    /// Of the syntax.
    pub fn element(&mut self, first: bool) -> Parsed<bool> {
        if self.eat(b']') {
            return Ok(false);
        }
        if first || self.eat(b',') { Ok(true) } else { self.fail("`,` or `]` is missing") }
    }

    /// Steps into an object or array whose kind was seen.
    pub fn enter(&mut self) {
        self.at += 1;
    }

    /// The string that begins here.
    ///
    /// # Errors
    /// Of the syntax.
    pub fn string(&mut self) -> Parsed<Text<'a>> {
        self.at += 1;
        let start = self.at;
        loop {
            match self.body.get(self.at) {
                Some(b'"') => {
                    let raw = self.body.get(start..self.at).unwrap_or_default();
                    self.at += 1;
                    return Ok(text(raw, &mut self.repaired));
                }
                Some(b'\\') => return self.escaped(start),
                Some(0..0x20) => return self.fail("a control character in a string"),
                Some(_) => self.at += 1,
                None => return self.fail("a string is not closed"),
            }
        }
    }

    /// The rest of a string with escapes.
    fn escaped(&mut self, start: usize) -> Parsed<Text<'a>> {
        let mut out = self.body.get(start..self.at).unwrap_or_default().to_vec();
        loop {
            let Some(byte) = self.body.get(self.at).copied() else { return self.fail("a string is not closed") };
            self.at += 1;
            match byte {
                b'"' => return Ok(text(&out, &mut self.repaired).into_owned().into()),
                b'\\' => {
                    let c = self.escape()?;
                    out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                }
                0..0x20 => return self.fail("a control character in a string"),
                other => out.push(other),
            }
        }
    }

    /// The character of an escape, after its backslash.
    fn escape(&mut self) -> Parsed<char> {
        let byte = self.body.get(self.at).copied();
        self.at += 1;
        Ok(match byte {
            Some(b'n') => '\n',
            Some(b't') => '\t',
            Some(b'r') => '\r',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(c @ (b'"' | b'\\' | b'/')) => c as char,
            Some(b'u') => self.unicode()?,
            _ => return self.fail("an unknown escape"),
        })
    }

    /// `\uXXXX`, and the second half of a surrogate pair. A half alone is repaired.
    fn unicode(&mut self) -> Parsed<char> {
        let first = self.hex()?;
        if let Some(c) = char::from_u32(first) {
            return Ok(c);
        }
        if (0xd800..0xdc00).contains(&first) && self.body.get(self.at..self.at + 2) == Some(b"\\u") {
            let here = self.at;
            self.at += 2;
            let second = self.hex()?;
            if (0xdc00..0xe000).contains(&second) {
                let code = 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
                return Ok(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            self.at = here;
        }
        self.repaired += 1;
        Ok(char::REPLACEMENT_CHARACTER)
    }

    fn hex(&mut self) -> Parsed<u32> {
        let mut code = 0;
        for _ in 0..4 {
            let digit = self.body.get(self.at).and_then(|b| char::from(*b).to_digit(16));
            let Some(digit) = digit else { return self.fail("four hex digits are missing") };
            code = code << 4 | digit;
            self.at += 1;
        }
        Ok(code)
    }

    /// The text of the number that begins here.
    ///
    /// # Errors
    /// When it is none of JSON's.
    pub fn number(&mut self) -> Parsed<&'a str> {
        let start = self.at;
        let digits = |s: &mut Self| {
            let from = s.at;
            while s.body.get(s.at).is_some_and(u8::is_ascii_digit) {
                s.at += 1;
            }
            s.at - from
        };
        self.at += usize::from(self.body.get(self.at) == Some(&b'-'));
        let zero = self.body.get(self.at) == Some(&b'0');
        let whole = digits(self);
        if whole == 0 || (zero && whole > 1) {
            return self.fail("a bad number");
        }
        if self.body.get(self.at) == Some(&b'.') {
            self.at += 1;
            if digits(self) == 0 {
                return self.fail("a bad number");
            }
        }
        if matches!(self.body.get(self.at), Some(b'e' | b'E')) {
            self.at += 1;
            self.at += usize::from(matches!(self.body.get(self.at), Some(b'+' | b'-')));
            if digits(self) == 0 {
                return self.fail("a bad number");
            }
        }
        Ok(self.raw(start))
    }

    /// `true`, `false`, or `null` as `None`.
    ///
    /// # Errors
    /// For any other word.
    pub fn word(&mut self) -> Parsed<Option<bool>> {
        for (word, value) in [("true", Some(true)), ("false", Some(false)), ("null", None)] {
            if self.body.get(self.at..).is_some_and(|rest| rest.starts_with(word.as_bytes())) {
                self.at += word.len();
                return Ok(value);
            }
        }
        self.fail("no JSON value")
    }

    /// The text from `start` to here; what was skipped as JSON is ASCII outside its strings, which may hold anything.
    #[must_use]
    pub fn raw(&self, start: usize) -> &'a str {
        self.body.get(start..self.at).and_then(|raw| std::str::from_utf8(raw).ok()).unwrap_or_default()
    }

    /// Passes over one value of any kind.
    ///
    /// # Errors
    /// Of the syntax, and past 128 levels.
    pub fn skip(&mut self) -> Parsed<()> {
        self.skip_at(DEPTH)
    }

    fn skip_at(&mut self, depth: usize) -> Parsed<()> {
        let Some(depth) = depth.checked_sub(1) else { return self.fail("values are nested deeper than 128 levels") };
        match self.kind()? {
            Kind::String => self.string().map(|_| ()),
            Kind::Number => self.number().map(|_| ()),
            Kind::Bool | Kind::Null => self.word().map(|_| ()),
            Kind::Object => {
                self.enter();
                let mut first = true;
                while self.key(first)?.is_some() {
                    first = false;
                    self.skip_at(depth)?;
                }
                Ok(())
            }
            Kind::Array => {
                self.enter();
                let mut first = true;
                while self.element(first)? {
                    first = false;
                    self.skip_at(depth)?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(text: &[u8]) -> Parsed<()> {
        let mut s = Scanner::new(text);
        s.skip()?;
        s.end()
    }

    #[test]
    fn strings_with_every_escape() {
        let mut s = Scanner::new(br#""a\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00\ud800x""#);
        assert_eq!(s.string().unwrap(), "a\"\\/\u{8}\u{c}\n\r\t\u{e9}\u{1f600}\u{fffd}x");
        assert_eq!(s.repaired, 1);
        let mut s = Scanner::new(b"\"a\xffb\"");
        assert_eq!((s.string().unwrap().as_ref(), s.repaired), ("a\u{fffd}b", 1));
    }

    #[test]
    fn numbers_are_those_of_the_grammar() {
        for good in ["0", "-0", "12", "0.5", "-1.25e+3", "1E9", "1e999"] {
            assert_eq!(Scanner::new(good.as_bytes()).number().unwrap(), good);
        }
        for bad in ["01", "-", "1.", ".5", "1e", "NaN", "+1", "0x1"] {
            assert!(whole(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn nesting_is_bounded() {
        let nested = |n: usize| [vec![b'['; n], vec![b']'; n]].concat();
        assert!(whole(&nested(128)).is_ok());
        assert!(whole(&nested(129)).is_err());
        assert!(whole(&vec![b'['; 1 << 20]).is_err());
    }

    proptest::proptest! {
        /// Where the text is UTF-8 and not deep, this scanner and serde_json agree on what is JSON.
        #[test]
        fn agrees_with_serde_json(text in r#"[\[\]{},:"a0-9.eE+\-\\untrfalse \n]{0,40}"#) {
            let reference = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
            proptest::prop_assert_eq!(whole(text.as_bytes()).is_ok(), reference, "{}", text);
        }

        #[test]
        fn any_value_of_serde_json_is_read(n in -1e9f64..1e9, s in ".{0,20}", i: i64) {
            let value = serde_json::json!({"a": [n, s, i, null, true, {"b": s}]});
            let mut scanner = Scanner::new(br#" "x" "#);
            proptest::prop_assert_eq!(scanner.kind(), Ok(Kind::String));
            let text = value.to_string();
            proptest::prop_assert!(whole(text.as_bytes()).is_ok(), "{}", text);
            let quoted = serde_json::to_string(&s).unwrap();
            proptest::prop_assert_eq!(Scanner::new(quoted.as_bytes()).string().unwrap(), s);
        }
    }
}
