//! What the JSON walkers share: the levels of an export request, and the values of ProtoJSON. As the specification asks: unknown
//! fields are ignored, 64-bit integers may be numbers or strings, ids are hex of either case. `"NaN"`, `"Infinity"` and
//! numbers out of range are values that become NULL later, not errors.

use crate::column::Text;
use crate::decode::{Context, undecodable};
use crate::otlp::scan::{Kind, Scanner, Syntax};
use crate::otlp::value::{Attribute, Value};
use flywheel_types::Error;
use std::borrow::Cow;

/// What a walk is after.
pub(crate) trait Items<'a>: Sized {
    /// Names of the three levels: groups of a resource, scopes, items.
    fn names(&self) -> [&'static str; 3];
    /// Takes the item that begins here.
    fn item(w: &mut Walker<'_, Self>, s: &mut Scanner<'a>, resource: &[Attribute<'a>]) -> Walked<()>;
}

/// Visits every item of an export request.
pub(crate) fn walk<'a, T: Items<'a>>(ctx: &Context<'_>, to: T, body: &'a [u8]) -> Result<(), Error> {
    let [groups, ..] = to.names();
    let mut walker = Walker { ctx, to, broken: None };
    let mut s = Scanner::new(body);
    if s.kind().map_err(undecodable)? != Kind::Object {
        return Err(undecodable("the body is not a JSON object"));
    }
    walker.fields(&mut s, |w, s, key| if key == groups { w.each(s, Walker::group) } else { Ok(s.skip()?) })?;
    s.end().map_err(undecodable)
}

/// Why a walk ended early.
pub(crate) enum Stop {
    Syntax(Syntax),
    Refused(Error),
}

impl From<Syntax> for Stop {
    fn from(e: Syntax) -> Self {
        Self::Syntax(e)
    }
}

impl From<Stop> for Error {
    fn from(e: Stop) -> Self {
        match e {
            Stop::Syntax(e) => undecodable(e),
            Stop::Refused(e) => e,
        }
    }
}

pub(crate) type Walked<T> = Result<T, Stop>;
pub(crate) type Broken = (&'static str, String);

/// A walk in progress.
pub(crate) struct Walker<'c, T> {
    pub ctx: &'c Context<'c>,
    /// Who takes the items.
    pub to: T,
    /// The first thing wrong with what is at hand.
    broken: Option<Broken>,
}

impl<'a, T: Items<'a>> Walker<'_, T> {
    /// `ResourceSpans` and its like. Scopes that come before their resource wait for it.
    fn group(&mut self, s: &mut Scanner<'a>) -> Walked<()> {
        let [_, scopes, _] = self.to.names();
        let (mut resource, mut early) = (None, Vec::new());
        self.fields(s, |w, s, key| {
            if key == "resource" {
                resource = Some(w.resource(s)?);
            } else if key == scopes {
                match &resource {
                    Some(resource) => w.each(s, |w, s| w.scope(s, resource))?,
                    None => {
                        s.kind()?;
                        early.push(s.at());
                        s.skip()?;
                    }
                }
            } else {
                s.skip()?;
            }
            Ok(())
        })?;
        let resource = resource.unwrap_or_default();
        for at in early {
            self.each(&mut s.back_at(at), |w, s| w.scope(s, &resource))?;
        }
        // a group that is no object has no record to blame
        self.broken = None;
        Ok(())
    }

    /// A resource that cannot be read leaves its records without one.
    fn resource(&mut self, s: &mut Scanner<'a>) -> Walked<Vec<Attribute<'a>>> {
        let mut out = Vec::new();
        let broken = self.watched(|w| {
            w.fields(s, |w, s, key| if key == "attributes" { w.attributes(s, &mut out) } else { Ok(s.skip()?) })
        })?;
        if broken.is_some() {
            out.clear();
        }
        Ok(out)
    }

    fn scope(&mut self, s: &mut Scanner<'a>, resource: &[Attribute<'a>]) -> Walked<()> {
        let [.., items] = self.to.names();
        self.fields(s, |w, s, key| if key == items { w.each(s, |w, s| T::item(w, s, resource)) } else { Ok(s.skip()?) })
    }
}

impl<T> Walker<'_, T> {
    /// Does `f` and answers what was wrong in it.
    pub fn watched(&mut self, f: impl FnOnce(&mut Self) -> Walked<()>) -> Walked<Option<Broken>> {
        let outer = self.broken.take();
        f(self)?;
        Ok(std::mem::replace(&mut self.broken, outer))
    }

    /// Every field of the object that begins here, if it is one; `f` takes the value.
    pub fn fields<'a>(
        &mut self,
        s: &mut Scanner<'a>,
        mut f: impl FnMut(&mut Self, &mut Scanner<'a>, &str) -> Walked<()>,
    ) -> Walked<()> {
        if !self.is(s, Kind::Object, "an object")? {
            return Ok(());
        }
        let mut first = true;
        while let Some(key) = s.key(first)? {
            first = false;
            f(self, s, &key)?;
        }
        Ok(())
    }

    /// Every element of the array that begins here, if it is one.
    pub fn each<'a>(
        &mut self,
        s: &mut Scanner<'a>,
        mut f: impl FnMut(&mut Self, &mut Scanner<'a>) -> Walked<()>,
    ) -> Walked<()> {
        if !self.is(s, Kind::Array, "an array")? {
            return Ok(());
        }
        let mut first = true;
        while s.element(first)? {
            first = false;
            f(self, s)?;
        }
        Ok(())
    }

    /// Steps into a value of the wanted kind. Null is an absent value; any other kind is skipped and noted.
    pub fn is(&mut self, s: &mut Scanner<'_>, wanted: Kind, name: &str) -> Walked<bool> {
        let kind = s.kind()?;
        if kind == wanted {
            s.enter();
            return Ok(true);
        }
        s.skip()?;
        if kind != Kind::Null {
            self.note("bad_record", || format!("{name} is expected, {kind:?} was found"));
        }
        Ok(false)
    }

    pub fn note(&mut self, reason: &'static str, detail: impl FnOnce() -> String) {
        self.broken.get_or_insert_with(|| (reason, detail()));
    }

    /// `KeyValue` list.
    pub fn attributes<'a>(&mut self, s: &mut Scanner<'a>, into: &mut Vec<Attribute<'a>>) -> Walked<()> {
        let limit = self.ctx.limits.attributes;
        self.each(s, |w, s| {
            let (mut key, mut value) = (Text::default(), Value::Null);
            w.fields(s, |w, s, name| {
                match name {
                    "key" => key = w.text(s)?.unwrap_or_default(),
                    "value" => value = w.any_value(s, w.ctx.limits.depth)?,
                    _ => s.skip()?,
                }
                Ok(())
            })?;
            if into.len() < limit {
                into.push((key, value));
            } else {
                w.note("too_many_attributes", || format!("more than {limit} attributes"));
            }
            Ok(())
        })
    }

    /// `AnyValue`, at most `depth` levels deep.
    pub fn any_value<'a>(&mut self, s: &mut Scanner<'a>, depth: usize) -> Walked<Value<'a>> {
        let Some(depth) = depth.checked_sub(1) else {
            self.note("too_deep", || "attribute values are nested too deeply".to_owned());
            s.skip()?;
            return Ok(Value::Null);
        };
        let mut out = Value::Null;
        self.fields(s, |w, s, key| {
            let found = match key {
                "stringValue" => w.text(s)?.map(Value::Text),
                "boolValue" => w.boolean(s)?.map(Value::Bool),
                "intValue" => w.parsed(s, "intValue", "a 64-bit integer")?.map(Value::Int),
                // `f64` parsing knows NaN, Infinity and turns 1e999 into infinity: all become NULL in the mapper.
                "doubleValue" => w.parsed(s, "doubleValue", "a number")?.map(Value::Double),
                "arrayValue" => Some(w.array(s, depth)?),
                "kvlistValue" => {
                    s.kind()?;
                    let start = s.at();
                    s.skip()?;
                    Some(Value::Map(s.raw(start).to_owned()))
                }
                "bytesValue" => w.text(s)?.map(|b| Value::Bytes(b.into_owned())),
                _ => {
                    s.skip()?;
                    None
                }
            };
            if let Some(found) = found {
                out = found;
            }
            Ok(())
        })?;
        Ok(out)
    }

    pub fn array<'a>(&mut self, s: &mut Scanner<'a>, depth: usize) -> Walked<Value<'a>> {
        let mut items = Vec::new();
        self.fields(s, |w, s, key| {
            if key != "values" {
                return Ok(s.skip()?);
            }
            w.each(s, |w, s| {
                items.push(w.any_value(s, depth)?);
                Ok(())
            })
        })?;
        Ok(Value::List(items))
    }

    pub fn text<'a>(&mut self, s: &mut Scanner<'a>) -> Walked<Option<Text<'a>>> {
        match s.kind()? {
            Kind::String => Ok(Some(s.string()?)),
            kind => {
                s.skip()?;
                if kind != Kind::Null {
                    self.note("bad_record", || format!("text is expected, {kind:?} was found"));
                }
                Ok(None)
            }
        }
    }

    pub fn boolean(&mut self, s: &mut Scanner<'_>) -> Walked<Option<bool>> {
        match s.kind()? {
            Kind::Bool | Kind::Null => Ok(s.word()?),
            kind => {
                s.skip()?;
                self.note("bad_value", || format!("boolValue is expected, {kind:?} was found"));
                Ok(None)
            }
        }
    }

    /// A number, as such or as text.
    pub fn parsed<N: std::str::FromStr>(&mut self, s: &mut Scanner<'_>, name: &str, what: &str) -> Walked<Option<N>> {
        let shown = match s.kind()? {
            Kind::String => s.string()?,
            Kind::Number => Cow::Borrowed(s.number()?),
            Kind::Null => {
                s.skip()?;
                return Ok(None);
            }
            kind => {
                s.skip()?;
                Cow::Owned(format!("{kind:?}"))
            }
        };
        let parsed = shown.parse().ok();
        if parsed.is_none() {
            self.note("bad_value", || format!("{name} `{}` is not {what}", short(&shown)));
        }
        Ok(parsed)
    }

    /// A 64-bit time, as a number or as a string.
    pub fn nanos(&mut self, s: &mut Scanner<'_>) -> Walked<u64> {
        let text = match s.kind()? {
            Kind::String => s.string()?,
            Kind::Number => Cow::Borrowed(s.number()?),
            kind => {
                s.skip()?;
                if kind == Kind::Null { Cow::Borrowed("") } else { Cow::Owned(format!("{kind:?}")) }
            }
        };
        if text.is_empty() {
            return Ok(0);
        }
        let parsed = text.parse().ok();
        if parsed.is_none() {
            self.note("bad_time", || format!("`{}` is not a time in nanoseconds from 0 to {}", short(&text), u64::MAX));
        }
        Ok(parsed.unwrap_or(0))
    }
}

fn short(text: &str) -> String {
    text.chars().take(32).collect()
}
